//! The examples of fencing in other languages, as they stand there: `examples/fencing.py` and `examples/fencing.sh`.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use leasehold::{FencingToken, Lease, Locker};

use crate::support::postgres::Cluster;
use crate::support::{Log, Member, quick};

/// Python as Debian's packages are for: another one on the path does not find psycopg.
const PYTHON: &str = "/usr/bin/python3";

const EXAMPLES: [&str; 2] = ["fencing.py", "fencing.sh"];

const MISSING: &str = "psql and python3 are there: scripts/install-test-servers installs them";

/// A server with the examples' tables, a term that goes on there, and an earlier one that is over.
struct Scene {
    cluster: Cluster,
    over: Term,
    held: Term,
    members: [Member; 2],
}

/// What a command finds in its environment.
struct Term {
    fence: String,
    token: FencingToken,
}

impl Term {
    async fn of(lease: &Lease) -> Self {
        Self { fence: lease.fence_sql().unwrap(), token: lease.fencing_token().await.unwrap() }
    }
}

impl Scene {
    async fn new() -> Self {
        let cluster = Cluster::new();
        cluster.admin().sql(
            "CREATE TABLE sweeps (by text NOT NULL); \
             CREATE TABLE invoices (id int PRIMARY KEY, sent boolean NOT NULL, fence bigint NOT NULL DEFAULT 0); \
             INSERT INTO invoices VALUES (42, false)",
        );
        let log = Log::default();
        let locker = |who| Locker::postgres(cluster.options(), quick(who)).unwrap();
        let mut earlier = Member::on(&locker("a"), "job", "a", &log);
        let lease = earlier.leads().await;
        let over = Term::of(&lease).await;
        let mut later = Member::on(&locker("b"), "job", "b", &log);
        later.stands_by().await;
        lease.step_down();
        let held = Term::of(&later.leads().await).await;
        Self { cluster, over, held, members: [earlier, later] }
    }

    /// A program as `leasehold run` starts it in this term, with libpq's variables.
    fn command(&self, term: &Term, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        let ours = std::env::vars_os().map(|(name, _)| name);
        for name in ours.filter(|name| name.as_encoded_bytes().starts_with(b"PG")) {
            command.env_remove(name);
        }
        command
            .env("PGHOST", "127.0.0.1")
            .env("PGPORT", self.cluster.port().to_string())
            .env("PGUSER", "postgres")
            .env("PGDATABASE", "postgres")
            .env("LEASEHOLD_IDENTITY", "this-host")
            .env("LEASEHOLD_TOKEN", term.token.to_string())
            .env("LEASEHOLD_FENCE_SQL", &term.fence)
            .stdin(Stdio::null());
        command
    }

    /// Runs `psql` with these arguments, and this as the `~/.psqlrc`.
    fn psql(&self, term: &Term, psqlrc: &str, arguments: &[&str]) -> Output {
        let file = self.cluster.dir().join("psqlrc");
        fs::write(&file, psqlrc).unwrap();
        self.command(term, "psql").env("PSQLRC", file).args(arguments).output().expect(MISSING)
    }

    fn written(&self) -> usize {
        self.cluster.admin().one("SELECT count(*) FROM sweeps")
    }

    async fn stop(self) {
        for member in self.members {
            member.stop().await.unwrap();
        }
    }
}

/// That example, with these arguments.
fn example(scene: &Scene, term: &Term, name: &str, arguments: &[&str]) -> Output {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples").join(name);
    let mut command = if name == EXAMPLES[0] {
        let mut command = scene.command(term, PYTHON);
        command.arg(path);
        command
    } else {
        scene.command(term, path)
    };
    command.args(arguments).output().expect(MISSING)
}

#[track_caller]
fn assert_fails(output: &Output, saying: &str) {
    assert!(!output.status.success(), "{output:?}");
    assert!(String::from_utf8_lossy(&output.stderr).contains(saying), "{output:?}");
}

/// T-02, C-08: what a command writes in a fenced transaction is committed in its term; after it, the command fails and has
/// written nothing.
#[tokio::test]
async fn a_command_writes_in_its_term_or_not_at_all() {
    let scene = Scene::new().await;
    for (n, name) in EXAMPLES.into_iter().enumerate() {
        let output = example(&scene, &scene.held, name, &["transaction"]);
        assert!(output.status.success() && output.stderr.is_empty(), "{name}: {output:?}");
        assert_eq!(scene.written(), n + 1, "{name}");
        assert_fails(&example(&scene, &scene.over, name, &["transaction"]), "leasehold: the term is over");
        assert_eq!(scene.written(), n + 1, "{name}");
    }
    assert_eq!(scene.cluster.admin().one::<String>("SELECT DISTINCT by FROM sweeps"), "this-host");
    scene.stop().await;
}

/// T-07, C-08: the check that a command has a resource make: equal or newer is taken, older is refused, and the command
/// fails then. So it does where there is no such row.
#[tokio::test]
async fn a_command_is_refused_by_a_resource_that_has_seen_a_later_term() {
    let scene = Scene::new().await;
    for name in EXAMPLES {
        let seen = || scene.cluster.admin().one::<i64>("SELECT fence FROM invoices WHERE sent");
        scene.cluster.admin().sql("UPDATE invoices SET sent = false, fence = 0");
        for term in [&scene.over, &scene.over, &scene.held] {
            let output = example(&scene, term, name, &["token", "42"]);
            assert!(output.status.success() && output.stderr.is_empty(), "{name}: {output:?}");
            assert_eq!(seen(), term.token.as_i64(), "{name}");
        }
        assert_fails(&example(&scene, &scene.over, name, &["token", "42"]), "a later term has written");
        assert_eq!(seen(), scene.held.token.as_i64(), "{name}");
        assert_fails(&example(&scene, &scene.held, name, &["token", "43"]), "or there is none");
        assert_eq!(example(&scene, &scene.held, name, &[]).status.code(), Some(2));
    }
    scene.stop().await;
}

/// T-06, documented: what `psql` makes of a fence, by how it is told to send it.
#[tokio::test]
async fn psql_sends_a_fence_that_holds_if_it_is_told_how() {
    const WRITE: &str = "INSERT INTO sweeps VALUES ('psql')";
    const STOP: &str = "--set=ON_ERROR_STOP=1";
    let scene = Scene::new().await;
    let Term { fence, .. } = &scene.held;
    let at_once = format!("BEGIN; {fence}; {WRITE}; COMMIT");

    // With the term going on. One message with BEGIN is refused, and so is a fence without a transaction.
    for (arguments, is_written) in [
        (&[STOP, "--single-transaction", "-c", fence, "-c", WRITE][..], true),
        (&[STOP, "-c", "BEGIN", "-c", fence, "-c", WRITE, "-c", "COMMIT"][..], true),
        (&[STOP, "-c", &at_once][..], false),
        (&[STOP, "--single-transaction", "-c", &at_once][..], true),
        (&[STOP, "-c", fence, "-c", WRITE][..], false),
        // Without ON_ERROR_STOP it goes on after that, and nothing is fenced.
        (&["-c", fence, "-c", WRITE][..], true),
    ] {
        let before = scene.written();
        let output = scene.psql(&scene.held, "", arguments);
        assert_eq!(scene.written() - before, usize::from(is_written), "{output:?}");
        assert_eq!(output.status.success(), is_written, "{output:?}");
    }

    // With the term over: whether it is written, and whether the exit code says so.
    let Term { fence, .. } = &scene.over;
    let forgiving = "\\set ON_ERROR_ROLLBACK on\n";
    for (psqlrc, arguments, is_written, succeeds) in [
        ("", &[STOP, "--single-transaction", "-c", fence, "-c", WRITE][..], false, false),
        ("", &["-c", "BEGIN", "-c", fence, "-c", WRITE, "-c", "COMMIT"][..], false, true),
        (forgiving, &[STOP, "--single-transaction", "-c", fence, "-c", WRITE][..], false, false),
        (forgiving, &["-c", "BEGIN", "-c", fence, "-c", WRITE, "-c", "COMMIT"][..], true, true),
        (forgiving, &["-X", "-c", "BEGIN", "-c", fence, "-c", WRITE, "-c", "COMMIT"][..], false, true),
    ] {
        let before = scene.written();
        let output = scene.psql(&scene.over, psqlrc, arguments);
        assert_eq!(scene.written() - before, usize::from(is_written), "{arguments:?}: {output:?}");
        assert_eq!(output.status.success(), succeeds, "{arguments:?}: {output:?}");
    }
    scene.stop().await;
}
