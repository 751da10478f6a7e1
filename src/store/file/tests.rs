#![cfg(target_os = "linux")]

use std::future::Future;
use std::os::unix::net::UnixDatagram;
use std::pin::pin;
use std::sync::mpsc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;
use std::{fs, iter};

use tempfile::TempDir;

use super::*;
use crate::name::{Kind, Name};
use crate::store::{Ask, Call, Mode, Presence, Return, Role, Standing};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn run(test: impl Future<Output = ()>) {
    runtime().block_on(async {
        tokio::time::timeout(Duration::from_mins(1), test).await.expect("the test hangs");
    });
}

/// Makes a disk hang until the sender is dropped.
fn hang(disk: &Disk) -> mpsc::Sender<()> {
    let (disk_answers, answer) = mpsc::channel::<()>();
    assert!(poll_once(pin!(disk.run(move || answer.recv()))).is_pending());
    disk_answers
}

fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

async fn session(dir: &Path) -> FileSession {
    FileStore::open(dir, "host:1-a").unwrap().connect().await.unwrap()
}

fn key(name: &str) -> Key {
    Key::of(Kind::Lease, name)
}

fn lock_file(dir: &TempDir, name: &str) -> PathBuf {
    dir.path().join(format!("{}.lock", key(name)))
}

fn ask(name: &str) -> Ask {
    Ask {
        key: key(name),
        name: Name::from(name),
        mode: Mode::Exclusive,
        ttl: Duration::from_secs(20),
        kind: Kind::Lease,
        waits: true,
        is_fenced: false,
        register: true,
    }
}

fn asks(names: &[&str]) -> Exchange<Held> {
    Exchange { releases: vec![], withdrawals: vec![], asks: names.iter().copied().map(ask).collect() }
}

fn clean(held: Held) -> Return<Held> {
    Return { held, is_clean: true, is_kept: false }
}

fn releases(held: impl IntoIterator<Item = Held>) -> Exchange<Held> {
    Exchange { releases: held.into_iter().map(clean).collect(), withdrawals: vec![], asks: vec![] }
}

async fn answer(session: &mut FileSession, ask: Ask) -> Answer<Held> {
    let exchange = Exchange { releases: vec![], withdrawals: vec![], asks: vec![ask] };
    session.exchange(&exchange).await.unwrap().answers.remove(0)
}

async fn take(session: &mut FileSession, name: &str) -> Held {
    match answer(session, ask(name)).await {
        Answer::Granted(held) => held,
        other => panic!("{name}: {other:?}"),
    }
}

async fn is_busy(session: &mut FileSession, name: &str) -> bool {
    match answer(session, ask(name)).await {
        Answer::Granted(held) => {
            session.exchange(&releases([held])).await.unwrap();
            false
        }
        Answer::Busy { registered } => {
            assert!(registered, "asking again would tell nothing new");
            true
        }
        Answer::Failed(reason) => panic!("{name}: {reason}"),
        Answer::Fenced(..) => panic!("it has no transactions"),
    }
}

async fn failure(session: &mut FileSession, name: &str) -> String {
    match answer(session, ask(name)).await {
        Answer::Failed(reason) => reason,
        other => panic!("{name}: {other:?}"),
    }
}

fn sockets(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir.join("peers")).unwrap().map(|entry| entry.unwrap().path()).collect()
}

fn send(dir: &Path, datagram: &str) {
    let sender = UnixDatagram::unbound().unwrap();
    for socket in sockets(dir) {
        sender.send_to(datagram.as_bytes(), socket).unwrap();
    }
}

#[test]
fn urls_are_paths_as_they_stand() {
    for (url, path) in [
        ("file:/var/lib/a", Ok("/var/lib/a")),
        ("file:///var/lib/a", Ok("/var/lib/a")),
        ("file:leases", Ok("leases")),
        ("file:./a/b", Ok("./a/b")),
        ("FILE:/a", Ok("/a")),
        ("file:/a%20b?c#d", Ok("/a%20b?c#d")),
        ("file:", Err(UrlError::FilePath)),
        ("file://", Err(UrlError::FilePath)),
        ("file://localhost/a", Err(UrlError::FileHost)),
        ("file://host", Err(UrlError::FileHost)),
        ("file:~/leases", Err(UrlError::FileShell { start: "~" })),
        ("file:$HOME/leases", Err(UrlError::FileShell { start: "$" })),
        ("/a", Err(UrlError::NoScheme)),
        ("redis://x", Err(UrlError::UnknownScheme { scheme: "redis".into() })),
    ] {
        assert_eq!(directory_of_url(url), path.map(PathBuf::from), "{url}");
    }
}

#[test]
fn one_session_is_granted_and_its_release_wakes_the_other() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut leader, mut standby) = (session(dir.path()).await, session(dir.path()).await);
        let held = take(&mut leader, "job").await;
        assert!(is_busy(&mut standby, "job").await);
        assert!(is_busy(&mut leader, "job").await, "not twice in one session either");

        let released = leader.exchange(&releases([held])).await.unwrap().released;
        assert_eq!(released, [true]);
        assert!(matches!(standby.event().await, Event::Freed(freed) if freed.key == key("job")));
        // It had asked for what it held itself.
        assert!(matches!(leader.event().await, Event::Freed(freed) if freed.key == key("job")));
        take(&mut standby, "job").await;
        assert!(lock_file(&dir, "job").exists(), "a lock file is never unlinked");
    });
}

#[test]
fn a_release_and_an_ask_of_one_exchange_are_done_in_this_order() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        let first = take(&mut session, "job").await;
        let both = Exchange { releases: vec![clean(first)], ..asks(&["job"]) };
        let exchanged = session.exchange(&both).await.unwrap();
        assert_eq!(exchanged.released, [true]);
        let Answer::Granted(second) = exchanged.answers[0] else { panic!("{exchanged:?}") };

        let stale = session.exchange(&releases([first])).await.unwrap();
        assert_eq!(stale.released, [false], "an old grant does not release a newer one");
        assert_eq!(session.heartbeat(&[first, second]).await.unwrap(), [false, true]);
    });
}

#[test]
fn readers_share_a_key_and_keep_a_writer_out() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut one, mut two) = (session(dir.path()).await, session(dir.path()).await);
        let mut writer = session(dir.path()).await;
        let shared = || Ask { mode: Mode::Read, ..ask("job") };
        let Answer::Granted(first) = answer(&mut one, shared()).await else { panic!() };
        let Answer::Granted(second) = answer(&mut two, shared()).await else { panic!() };
        assert!(is_busy(&mut writer, "job").await);
        // Each reader of a session has a grant of its own.
        let Answer::Granted(third) = answer(&mut one, shared()).await else { panic!() };
        for held in [first, third] {
            assert!(is_busy(&mut writer, "job").await);
            one.exchange(&releases([held])).await.unwrap();
        }
        assert!(is_busy(&mut writer, "job").await);
        two.exchange(&releases([second])).await.unwrap();
        take(&mut writer, "job").await;
        assert!(matches!(answer(&mut one, shared()).await, Answer::Busy { registered: true }));
    });
}

#[test]
fn only_keys_that_a_session_waits_for_are_pushed_to_it() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut leader, mut standby) = (session(dir.path()).await, session(dir.path()).await);
        let mut held = Vec::new();
        for name in ["other", "withdrawn", "unregistered", "a", "b"] {
            held.push(take(&mut leader, name).await);
        }
        let unregistered = Ask { register: false, ..ask("unregistered") };
        let mut waiting = asks(&["withdrawn", "a", "b"]);
        waiting.asks.push(unregistered);
        standby.exchange(&waiting).await.unwrap();
        let withdrawal = Exchange { withdrawals: vec![key("withdrawn")], ..asks(&[]) };
        standby.exchange(&withdrawal).await.unwrap();

        leader.exchange(&releases(held)).await.unwrap();
        assert!(matches!(standby.event().await, Event::Freed(freed) if freed.key == key("a")));
        assert!(matches!(standby.event().await, Event::Freed(freed) if freed.key == key("b")));
        let mut more = pin!(standby.event());
        assert!(poll_once(more.as_mut()).is_pending());
    });
}

#[test]
fn a_replaced_or_removed_lock_file_is_a_lost_lease_and_the_others_stay() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        let mut held = Vec::new();
        for name in ["kept", "removed", "replaced", "kept too"] {
            held.push(take(&mut session, name).await);
        }
        fs::remove_file(lock_file(&dir, "removed")).unwrap();
        let other = dir.path().join("other");
        fs::write(&other, "").unwrap();
        fs::rename(&other, lock_file(&dir, "replaced")).unwrap();

        assert_eq!(session.heartbeat(&held).await.unwrap(), [true, false, false, true]);
        let again = session.exchange(&releases(held)).await.unwrap();
        assert_eq!(again.released, [true, false, false, true]);
        take(&mut session, "replaced").await;
    });
}

#[test]
fn a_release_tells_that_the_lease_had_been_lost() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        let held = take(&mut session, "job").await;
        fs::remove_file(lock_file(&dir, "job")).unwrap();
        assert_eq!(session.exchange(&releases([held])).await.unwrap().released, [false]);
    });
}

#[test]
fn a_dropped_exchange_leaves_its_locks_with_the_session_until_that_is_dropped() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut first, mut second) = (session(dir.path()).await, session(dir.path()).await);
        take(&mut first, "before").await;
        let exchange = asks(&["in flight"]);
        let hanging = hang(&first.disk);
        assert!(poll_once(pin!(first.exchange(&exchange))).is_pending());
        drop(hanging);
        first.disk.run(|| ()).await.unwrap();
        assert!(is_busy(&mut second, "before").await);
        assert!(is_busy(&mut second, "in flight").await);

        drop(first);
        assert!(!is_busy(&mut second, "before").await);
        assert!(!is_busy(&mut second, "in flight").await);
        assert_eq!(sockets(dir.path()).len(), 1, "the socket of the dropped session is gone");
    });
}

#[test]
fn a_session_dropped_while_the_disk_hangs_is_unlocked_when_the_statement_ends() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut first, mut second) = (session(dir.path()).await, session(dir.path()).await);
        take(&mut first, "before").await;
        let hanging = hang(&first.disk);
        let exchange = asks(&["in flight"]);
        assert!(poll_once(pin!(first.exchange(&exchange))).is_pending());
        let disk = first.disk.clone();
        // Returns although the disk hangs.
        drop(first);

        drop(hanging);
        disk.run(|| ()).await.unwrap();
        assert!(!is_busy(&mut second, "before").await);
        assert!(!lock_file(&dir, "in flight").exists(), "nothing more is tried for a session that is gone");
        assert_eq!(sockets(dir.path()).len(), 1);
    });
}

#[test]
fn a_session_dropped_outside_of_any_runtime_is_unlocked() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = runtime();
    let mut first = runtime.block_on(session(dir.path()));
    runtime.block_on(take(&mut first, "job"));
    drop(runtime);
    drop(first);
    assert_eq!(sockets(dir.path()), [] as [PathBuf; 0]);
    run(async { assert!(!is_busy(&mut session(dir.path()).await, "job").await) });
}

#[test]
fn a_connect_dropped_in_the_middle_leaves_nothing_open() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let store = FileStore::open(dir.path(), "host:1-a").unwrap();
        let disk = Disk::new().unwrap();
        let hanging = hang(&disk);
        assert!(poll_once(pin!(store.connect_on(disk.clone()))).is_pending());
        drop(hanging);
        disk.run(|| ()).await.unwrap();
        assert_eq!(sockets(dir.path()), [] as [PathBuf; 0]);
    });
}

#[test]
fn a_socket_whose_name_was_removed_is_bound_anew() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut leader, mut standby) = (session(dir.path()).await, session(dir.path()).await);
        let held = take(&mut leader, "job").await;
        assert!(is_busy(&mut standby, "job").await);
        fs::remove_dir_all(dir.path().join("peers")).unwrap();
        standby.heartbeat(&[]).await.unwrap();
        assert_eq!(sockets(dir.path()).len(), 1);
        leader.exchange(&releases([held])).await.unwrap();
        assert!(matches!(standby.event().await, Event::Freed(freed) if freed.key == key("job")));
        drop((leader, standby));
        assert_eq!(sockets(dir.path()), [] as [PathBuf; 0]);
    });
}

#[test]
fn an_orderly_end_frees_everything_and_wakes_the_others() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut leader, mut standby) = (session(dir.path()).await, session(dir.path()).await);
        take(&mut leader, "job").await;
        take(&mut leader, "other").await;
        assert!(is_busy(&mut standby, "job").await);
        leader.end().await;
        assert!(matches!(standby.event().await, Event::Freed(freed) if freed.key == key("job")));
        take(&mut standby, "job").await;
        assert!(!is_busy(&mut standby, "other").await);
        assert_eq!(sockets(dir.path()).len(), 1);
    });
}

#[test]
fn a_session_may_end_when_a_peer_died_and_removes_its_socket() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut leader = session(dir.path()).await;
        take(&mut leader, "job").await;
        drop(UnixDatagram::bind(dir.path().join("peers/dead.sock")).unwrap());
        leader.end().await;
        assert_eq!(sockets(dir.path()), [] as [PathBuf; 0]);
    });
}

#[test]
fn sockets_work_in_a_directory_whose_path_is_too_long_for_them() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("x".repeat(100)).join("y".repeat(100));
    run(async {
        let (mut leader, mut standby) = (session(&dir).await, session(&dir).await);
        let held = take(&mut leader, "job").await;
        assert!(is_busy(&mut standby, "job").await);
        leader.exchange(&releases([held])).await.unwrap();
        assert!(matches!(standby.event().await, Event::Freed(freed) if freed.key == key("job")));
        leader.end().await;
        drop(standby);
        assert_eq!(sockets(&dir), [] as [PathBuf; 0]);
    });
}

#[test]
fn malformed_datagrams_are_ignored() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        let long = "x".repeat(5000);
        for datagram in ["", "hello", "freed", "freed zz", "step-down", &long] {
            send(dir.path(), datagram);
        }
        send(dir.path(), &format!("step-down {}", key("job")));
        let event = loop {
            match session.event().await {
                Event::Ignored => {}
                event => break event,
            }
        };
        assert!(matches!(event, Event::Message(Message::StepDown(got)) if got == key("job")));
    });
}

#[test]
fn a_request_to_step_down_reaches_every_session_the_own_one_too() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut one, mut two) = (session(dir.path()).await, session(dir.path()).await);
        let message = Message::StepDown(key("job"));
        one.publish(message.clone()).await.unwrap();
        for session in [&mut one, &mut two] {
            assert!(matches!(session.event().await, Event::Message(got) if got == message));
            assert!(poll_once(pin!(session.event())).is_pending(), "once");
        }
    });
}

fn call(number: u64) -> Message {
    Message::RollCall(Call { number, reply_to: String::new() })
}

/// Takes a roll call from the events of a session, and answers it with this many names.
async fn present(session: &mut FileSession, names: usize) {
    let Event::Message(Message::RollCall(call)) = session.event().await else { panic!("no roll call") };
    let standing = |n: usize| Standing {
        name: Name::from(format!("{n} \u{e9} {}", "x".repeat(1000))),
        role: Role::Leading,
        term: Some(1),
        held_for: None,
    };
    let standings = (0..names).map(standing).collect();
    let (session_name, identity) = (String::new(), "anybody".to_owned());
    let presence =
        Presence { call, session: session_name, identity, steps_down: true, part: (1, 1), standings };
    session.publish(Message::Present(presence)).await.unwrap();
}

#[test]
fn an_answer_reaches_who_has_called_and_nobody_else_however_long_it_is() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut one, mut two, mut three) =
            (session(dir.path()).await, session(dir.path()).await, session(dir.path()).await);
        one.publish(call(1)).await.unwrap();
        for (session, names) in [(&mut two, 100), (&mut three, 0), (&mut one, 3)] {
            present(session, names).await;
        }
        let mut sessions = HashSet::new();
        let mut found = 0;
        while found < 103 || sessions.len() < 3 {
            let Event::Message(Message::Present(presence)) = one.event().await else { panic!("no answer") };
            assert_eq!(presence.call.number, 1);
            found += presence.standings.len();
            sessions.insert(presence.session);
        }
        let seen = one.survey().await.unwrap().unwrap();
        let shown: HashSet<_> = seen.into_iter().filter(|it| it.answers).map(|it| it.session).collect();
        assert_eq!(sessions, shown);
        for session in [&mut two, &mut three] {
            assert!(poll_once(pin!(session.event())).is_pending(), "nobody else hears the answers");
        }
    });
}

#[test]
fn a_roll_call_that_leads_elsewhere_is_not_answered() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        let elsewhere = UnixDatagram::bind(dir.path().join("elsewhere.sock")).unwrap();
        elsewhere.set_nonblocking(true).unwrap();
        send(dir.path(), "roll-call 0000000000000001 ../elsewhere.sock");
        present(&mut session, 1).await;
        elsewhere.recv(&mut [0; 8]).unwrap_err();
    });
}

#[test]
#[cfg(target_os = "linux")]
fn who_holds_a_key_now_shows_in_the_store_and_who_held_it_before_does_not() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let (mut one, mut two) = (session(dir.path()).await, session(dir.path()).await);
        let mut held = Vec::new();
        for name in ["kept", "released"] {
            held.push(take(&mut one, name).await);
        }
        assert_eq!(one.exchange(&releases(held.pop())).await.unwrap().released, [true]);
        let seen = two.survey().await.unwrap().unwrap();
        let holders: Vec<_> = seen.iter().filter(|seen| !seen.holds.is_empty()).collect();
        assert_eq!(holders.len(), 1, "{seen:?}");
        assert_eq!(holders[0].holds, [key("kept")]);
        assert_eq!(holders[0].who.pid, Some(std::process::id().cast_signed()));
    });
}

#[test]
fn a_cancelled_wait_loses_no_event() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        for name in ["a", "b"] {
            assert!(poll_once(pin!(session.event())).is_pending());
            send(dir.path(), &format!("step-down {}", key(name)));
        }
        for name in ["a", "b"] {
            assert!(
                matches!(session.event().await, Event::Message(Message::StepDown(got)) if got == key(name))
            );
        }
    });
}

#[test]
fn a_directory_that_is_gone_fails_the_asks_and_is_not_made_anew() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("leases");
    run(async {
        let mut store = FileStore::open(&dir, "host:1-a").unwrap();
        let mut session = store.connect().await.unwrap();
        let held = take(&mut session, "job").await;
        fs::remove_dir_all(&dir).unwrap();
        let reason = failure(&mut session, "other").await;
        assert!(reason.contains("the directory was removed"), "{reason}");
        assert_eq!(session.heartbeat(&[held]).await.unwrap(), [false]);
        let refused = store.connect().await.unwrap_err().to_string();
        assert!(refused.contains("the directory was removed"), "{refused}");
        assert!(!dir.exists());
    });
}

#[test]
fn a_directory_that_was_replaced_ends_the_session() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("leases");
    run(async {
        let mut old = session(&dir).await;
        let held = take(&mut old, "job").await;
        fs::rename(&dir, base.path().join("moved")).unwrap();
        let mut new = session(&dir).await;
        take(&mut new, "job").await;
        let lost = old.heartbeat(&[held]).await.unwrap_err();
        assert!(lost.to_string().contains("replaced"), "{lost}");
        assert!(old.exchange(&asks(&["other"])).await.is_err());
    });
}

#[test]
fn an_ask_that_fails_says_why_and_the_session_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        fs::create_dir(lock_file(&dir, "blocked")).unwrap();
        let answers = session.exchange(&asks(&["one", "blocked", "two"])).await.unwrap().answers;
        assert!(matches!(answers[..], [Answer::Granted(_), Answer::Failed(_), Answer::Granted(_)]));
        let reason = failure(&mut session, "blocked").await;
        assert!(
            reason.contains(".lock") && reason.contains("something else stands in its place"),
            "{reason}"
        );
    });
}

/// The limit holds for the whole process, so the test runs itself in another one.
#[test]
fn at_the_limit_of_open_files_an_ask_names_the_limit_and_the_session_goes_on() {
    use rustix::process::{Resource, getrlimit, setrlimit};

    const CHILD: &str = "LEASEHOLD_TEST_FEW_FILES";
    if std::env::var_os(CHILD).is_none() {
        let test = "at_the_limit_of_open_files_an_ask_names_the_limit_and_the_session_goes_on";
        let mut child = std::process::Command::new(std::env::current_exe().unwrap());
        child.args(["--exact", &format!("{}::{test}", module_path!().split_once("::").unwrap().1)]);
        let output = child.env(CHILD, "1").output().unwrap();
        let stdout = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && stdout.contains("1 passed"), "{stdout}");
        return;
    }
    let limit = rustix::process::Rlimit { current: Some(256), ..getrlimit(Resource::Nofile) };
    setrlimit(Resource::Nofile, limit).unwrap();

    let dir = tempfile::tempdir().unwrap();
    run(async {
        let mut session = session(dir.path()).await;
        let names: Vec<_> = (0..1_100).map(|i| i.to_string()).collect();
        let all = asks(&names.iter().map(String::as_str).collect::<Vec<_>>());
        let (mut held, mut failed) = (Vec::new(), Vec::new());
        for answer in session.exchange(&all).await.unwrap().answers {
            match answer {
                Answer::Granted(granted) => held.push(granted),
                Answer::Failed(reason) => failed.push(reason),
                Answer::Busy { .. } | Answer::Fenced(..) => panic!("nobody else asks"),
            }
        }
        assert!(held.len() > 200 && held.len() + failed.len() == 1_100, "{}", held.len());
        assert!(failed.iter().all(|reason| reason.contains("ulimit -n")), "{}", failed[0]);

        let alive = session.heartbeat(&held).await.unwrap();
        assert!(iter::zip(&held, alive).all(|(_, alive)| alive));
        assert!(session.exchange(&releases(held)).await.unwrap().released.iter().all(|released| *released));
        take(&mut session, "1099").await;
    });
}
