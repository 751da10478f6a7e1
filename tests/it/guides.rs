//! What the guides say, taken out of their pages: SQL is run, links lead somewhere, numbers are those of the product.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use leasehold::{DEFAULT_QUERY_TIMEOUT, Options};

const MANIFEST: &str = include_str!("../../examples/kubernetes/deployment.yaml");
const COMPARED: &str = include_str!("../../docs/compared.md");
const README: &str = include_str!("../../README.md");
const KUBERNETES: &str = include_str!("../../docs/kubernetes.md");

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The pages that people read, with where they are.
fn pages() -> Vec<(PathBuf, String)> {
    let of = |folder: &str| {
        let entries = fs::read_dir(root().join(folder)).unwrap();
        entries
            .map(|entry| entry.unwrap().path())
            .filter(|path| path.extension().is_some_and(|it| it == "md"))
    };
    let pages: Vec<_> =
        of("").chain(of("docs")).map(|path| (path.clone(), fs::read_to_string(path).unwrap())).collect();
    assert!(pages.len() > 12, "{pages:?}");
    pages
}

/// The lines of a page that are text: those of code are not.
fn text_of(page: &str) -> Vec<&str> {
    let mut is_code = false;
    let is_text = |line: &&str| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_fence && !is_code
    };
    page.lines().filter(is_text).collect()
}

/// What a page links to: `[text](here)` and `[name]: here`.
fn links_of(page: &str) -> Vec<String> {
    let mut links = Vec::new();
    for line in text_of(page) {
        let inline = line.match_indices("](").map(|(at, _)| &line[at + 2..]);
        let inline = inline.filter_map(|rest| rest[..rest.find(')')?].split(' ').next());
        links.extend(inline.map(str::to_owned));
        if let Some((_, link)) = line.strip_prefix('[').and_then(|rest| rest.split_once("]: "))
            && !line.starts_with("[^")
        {
            links.push(link.to_owned());
        }
    }
    links
}

/// How a forge calls a heading.
fn anchor_of(heading: &str) -> String {
    let kept = heading
        .to_lowercase()
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c))
        .collect::<String>();
    kept.replace(' ', "-")
}

fn anchors_of(page: &str) -> BTreeSet<String> {
    let headings = text_of(page).into_iter().filter(|line| line.starts_with('#'));
    headings.map(|line| anchor_of(line.trim_start_matches('#').trim())).collect()
}

#[test]
fn every_link_between_pages_leads_somewhere() {
    let mut checked = 0;
    for (path, page) in pages() {
        for link in links_of(&page).iter().filter(|link| !link.contains("://")) {
            let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            assert!(target.exists(), "{}: {link}", path.display());
            if !anchor.is_empty() && target.extension().is_some_and(|it| it == "md") {
                let anchors = anchors_of(&fs::read_to_string(&target).unwrap());
                assert!(anchors.contains(anchor), "{}: {link}: there is {anchors:?}", path.display());
            }
            checked += 1;
        }
    }
    assert!(checked > 50, "{checked} links");
}

#[test]
fn every_reference_of_a_page_is_defined_in_it() {
    for (path, page) in pages() {
        let text = text_of(&page).join("\n");
        for (at, _) in text.match_indices("][") {
            let rest = &text[at + 2..];
            let name = &rest[..rest.find(']').unwrap_or_default()];
            assert!(text.contains(&format!("\n[{name}]: ")), "{}: [{name}]", path.display());
        }
        for (at, _) in text.match_indices("[^") {
            let note = &text[at..=at + text[at..].find(']').unwrap()];
            assert!(text.contains(&format!("\n{note}: ")), "{}: {note}", path.display());
        }
    }
}

/// The tests that a cell of the comparison names: file and function.
fn tests_of(cell: &str) -> Vec<(&str, &str)> {
    let links = cell.split("](../tests/it/").skip(1);
    links
        .map(|link| {
            link.split_once(" \"")
                .and_then(|(file, rest)| Some((file, rest.split_once("\")")?.0)))
                .expect(cell)
        })
        .collect()
}

fn assert_is_a_test(file: &str, function: &str) {
    let source = fs::read_to_string(root().join("tests/it").join(file)).unwrap();
    let lines: Vec<&str> = source.lines().map(str::trim).collect();
    let start = format!("fn {function}(");
    let at = lines.iter().position(|line| line.strip_prefix("async ").unwrap_or(line).starts_with(&start));
    let at = at.unwrap_or_else(|| panic!("{file} has no {function}"));
    let attributes = lines[..at].iter().rev().take_while(|line| line.starts_with("#["));
    assert!(attributes.into_iter().any(|line| line.contains("test")), "{file}: {function} is no test");
}

#[test]
fn every_cell_of_ours_in_the_comparison_leads_to_its_test() {
    let (ours, others) = COMPARED.split_once("## Libraries over").unwrap();
    let rows_of = |text: &'static str| -> Vec<Vec<&str>> {
        let rows = text.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| |"));
        rows.map(|row| row.trim_matches('|').split('|').map(str::trim).collect()).collect()
    };
    let (ours, others) = (rows_of(ours), rows_of(others));
    assert!(ours.len() >= 15 && others.len() >= 12, "{ours:?}, {others:?}");
    for row in &ours {
        assert!(!tests_of(row[1]).is_empty(), "no test is named: {row:?}");
        for (file, function) in row.iter().flat_map(|cell| tests_of(cell)) {
            assert_is_a_test(file, function);
        }
    }
    for (rows, columns) in [(ours, 7), (others, 6)] {
        for row in rows {
            assert!(row.len() == columns && row.iter().all(|cell| !cell.is_empty()), "{row:?}");
        }
    }
}

#[test]
fn the_page_calls_the_crate_young_for_as_long_as_it_is() {
    assert!(env!("CARGO_PKG_VERSION").starts_with("0."), "the comparison says: version 0");
    assert!(README.contains("not on crates.io yet"), "the comparison says: not on crates.io");
}

/// The tests that the guides name in their text are there: a file with the tests of it in one paragraph or item.
#[test]
fn tests_that_the_guides_name_are_there() {
    let tests: BTreeSet<String> = fs::read_dir(root().join("tests/it"))
        .unwrap()
        .map(|it| it.unwrap().path())
        .filter(|path| path.is_file())
        .flat_map(|path| {
            let source = fs::read_to_string(path).unwrap();
            source
                .lines()
                .filter_map(|line| Some(line.split_once("fn ")?.1.split('(').next()?.to_owned()))
                .collect::<Vec<_>>()
        })
        .collect();
    for page in ["poolers.md", "kubernetes.md"] {
        let page = fs::read_to_string(root().join("docs").join(page)).unwrap();
        let named: Vec<&str> = page
            .split('`')
            .filter(|it| it.matches('_').count() >= 4 && !it.contains(['(', ' ', ':', '.']))
            .collect();
        assert!(!named.is_empty());
        for name in named {
            assert!(tests.contains(name), "{name}");
        }
    }
}

/// What stands behind a key of the manifest, which has each of these once.
fn of_manifest(key: &str) -> &'static str {
    let mut values = MANIFEST
        .lines()
        .filter_map(|line| line.trim_start_matches([' ', '-']).strip_prefix(key)?.strip_prefix(": "));
    let value = values.next().unwrap_or_else(|| panic!("the manifest has no {key}"));
    assert_eq!(values.next(), None, "{key} is there twice");
    value
}

/// The manifest's own options, whose times have to fit into what Kubernetes gives a pod to stop.
#[test]
fn a_pod_has_the_time_to_stop_in_order() {
    let seconds = |key| Duration::from_secs(of_manifest(key).parse().unwrap());
    let text = MANIFEST
        .split("LEASEHOLD_OPTIONS")
        .nth(1)
        .unwrap()
        .split("value: ")
        .nth(1)
        .unwrap()
        .lines()
        .next()
        .unwrap();
    let options: Options = text.parse().unwrap();
    options.validate().unwrap();
    let drain = text.split(',').find_map(|it| it.strip_prefix("drain_timeout=")).expect("it is limited");
    let drain = Duration::from_secs(drain.strip_suffix('s').unwrap().parse().unwrap());
    assert_eq!(options, options.clone().drain_timeout(Some(drain)), "{text}");
    assert!(!text.contains("query_timeout"), "the default is what is reckoned with");

    let (given, pre_stop, grace) =
        (seconds("terminationGracePeriodSeconds"), seconds("seconds"), options.get_stop_grace());
    let together = pre_stop + drain + grace + DEFAULT_QUERY_TIMEOUT;
    assert!(given > together, "{given:?} for {together:?}");
    for (part, time) in [
        ("preStop", pre_stop),
        ("drain_timeout", drain),
        ("stop_grace", grace),
        ("query_timeout", DEFAULT_QUERY_TIMEOUT),
    ] {
        let row = format!("| `{part}` | {} s |", time.as_secs());
        assert!(KUBERNETES.contains(&row), "the guide has no row that begins with {row}");
    }
    let row = format!("| together | {} s | of {} s |", together.as_secs(), given.as_secs());
    assert!(KUBERNETES.contains(&row), "the guide has no row {row}");
}

/// F-43: a job that is past its deadline is dropped when its grace is over: nobody is restarted for it before.
#[test]
fn a_liveness_probe_does_not_come_before_the_grace_is_over() {
    let options = Options::default();
    let probe = MANIFEST.split("livenessProbe").nth(1).unwrap().split("readinessProbe").next().unwrap();
    let of = |key: &str| -> u64 {
        let line = probe.lines().find_map(|line| line.trim().strip_prefix(key)).unwrap();
        line.trim_start_matches(": ").parse().unwrap()
    };
    // Between the first probe that fails and the last one that has to.
    let shortest = Duration::from_secs(of("periodSeconds") * (of("failureThreshold") - 1));
    assert!(shortest > options.get_stop_grace(), "{shortest:?}");
}

#[cfg(all(unix, feature = "postgres"))]
mod on_a_server {
    use std::collections::BTreeMap;

    use leasehold::{CancellationToken, Key, Kind, Locker, LossCause, Name, Reason, Slot};
    use sqlx::Connection as _;

    use crate::support::member::over;
    use crate::support::postgres::{Database, Rows};
    use crate::support::{Log, Member, eventually, quick};

    const OPERATING: &str = include_str!("../../docs/operating.md");

    /// The SQL of the guide, by its first line. Each statement has to be taken.
    struct Statements(BTreeMap<&'static str, &'static str>);

    impl Statements {
        fn of_the_guide() -> Self {
            let blocks =
                OPERATING.split("\n```sql\n").skip(1).map(|rest| rest.split("\n```").next().unwrap());
            let named = blocks.map(|sql| {
                let (title, _) = sql.split_once('\n').unwrap();
                (title.strip_prefix("-- ").expect("a statement says what it is for"), sql)
            });
            let statements: BTreeMap<_, _> = named.collect();
            assert_eq!(statements.len(), OPERATING.matches("```sql").count(), "each has a name of its own");
            Self(statements)
        }

        fn take(&mut self, title: &str) -> &'static str {
            self.0.remove(title).unwrap_or_else(|| panic!("{title:?} is not in {:?}", self.0.keys()))
        }
    }

    /// The second column: who.
    fn names(rows: &Rows) -> Vec<&str> {
        rows.iter().map(|row| row[1].as_str()).collect()
    }

    /// C-06, D05: whoever operates it sees the leader and the standby by the statements of the guide, and ends the leader
    /// by them, which is told.
    #[tokio::test]
    async fn the_statements_of_the_guide_show_and_end_a_leader() {
        let (database, log, mut guide) = (Database::new(), Log::default(), Statements::of_the_guide());
        let admin = database.admin();
        let locker = |who| Locker::postgres(database.options(), quick(who)).unwrap();
        let mut leader = Member::on(&locker("web-1"), "sweeper", "web-1", &log);
        let lease = leader.leads().await;
        let mut standby = Member::on(&locker("web-2"), "sweeper", "web-2", &log);
        standby.stands_by().await;
        let other = locker("web-3");
        let mut bystander = Member::on(&other, "another", "web-3", &log);
        let lease_of_other = bystander.leads().await;

        let everybody = guide.take("Every Locker on this database");
        assert_eq!(names(&admin.sql(everybody)), ["web-1", "web-2", "web-3"]);
        let leads = guide.take("Who leads 'sweeper'");
        assert_eq!(names(&admin.sql(leads)), ["leasehold/web-1"]);
        let waits = guide.take("Who stands by for 'sweeper'");
        let waiting = eventually("web-2 is registered", || admin.sql(waits), |rows| !rows.is_empty()).await;
        assert_eq!(names(&waiting), ["leasehold/web-2"]);

        // Its session is ended, and nobody else's.
        let ended = admin.sql(guide.take("End the session of whoever leads 'sweeper'"));
        assert_eq!(names(&ended), ["t"]);
        assert!(matches!(over(&lease).await, Some(Reason::Lost(LossCause::Closed { .. }))));
        assert!(lease_of_other.check().await);

        // It has connected again, and may lead again, until it stops.
        drop(leader.stop().await);
        standby.leads().await;
        assert_eq!(names(&admin.sql(leads)), ["leasehold/web-2"]);
        drop(standby.stop().await);

        let end = guide.take("End the session of one Locker, by its identity").replace("web-1", "web-3");
        assert_eq!(names(&admin.sql(&end)), ["t"]);
        assert!(matches!(over(&lease_of_other).await, Some(Reason::Lost(_))));
        drop(bystander.stop().await);

        let (stop, locker) =
            (CancellationToken::new(), Locker::postgres(database.options(), quick("web-5")).unwrap());
        let every = locker.every("digest", std::time::Duration::from_hours(1)).until(stop.clone());
        let served = every.run(async |_: Slot| {
            stop.cancel();
            anyhow::Ok(())
        });
        served.await.unwrap();
        let slots = admin.sql(guide.take("Who has served which slot last"));
        assert_eq!(
            (slots.len(), &*slots[0][0], &*slots[0][4], &*slots[0][6]),
            (1, "digest", "finished", "web-5")
        );
        assert!(guide.0.is_empty(), "not run: {:?}", guide.0.keys());
    }

    /// L-19: what the guide says of moving: shared locks of the old code, too.
    #[tokio::test]
    async fn a_plain_shared_lock_is_a_reader() {
        let database = Database::new();
        let locker = Locker::postgres(database.options(), quick("a")).unwrap();
        let lock = locker.rw_lock(Name::key(42));
        let mut old = database.connect().await;
        sqlx::raw_sql("SELECT pg_advisory_lock_shared(42)").execute(&mut old).await.unwrap();
        assert!(lock.try_write().await.unwrap().is_none());
        let reads = lock.try_read().await.unwrap().expect("readers come in together");
        sqlx::raw_sql("SELECT pg_advisory_unlock_shared(42)").execute(&mut old).await.unwrap();
        reads.release().await.unwrap();
        lock.try_write().await.unwrap().expect("nobody else is in").release().await.unwrap();
        assert_eq!(Key::of(Kind::RwLock, Name::key(42)).get(), 42);
        old.close().await.unwrap();
        locker.close().await;
    }
}
