//! `leasehold lock`: a command in a critical section, as a person or a script uses it.

use std::fs::{self, File};
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use leasehold::{Key, Kind, LockError, LockGuard};
use rustix::process::{Pid, Signal, kill_process};

use crate::command_children::guard;
use crate::support::command::{PROGRAM, Run, Scene, runs};
use crate::support::{Stage, eventually, now, quick, until};

/// In, until somebody makes a file of its name and `.go`; that is logged.
const STAYS: &str = "echo $LEASEHOLD_IDENTITY in >> log; \
                     until [ -e $LEASEHOLD_IDENTITY.go ]; do sleep 0.02; done; \
                     echo $LEASEHOLD_IDENTITY out >> log";

/// Does not end when it is told to.
const STUBBORN: &str = "trap : TERM; echo $$ > $LEASEHOLD_IDENTITY; while :; do sleep 0.05; done";

impl Scene {
    /// `leasehold lock OPTIONS… job -- sh -c SCRIPT`
    fn lock(&self, options: &[&str], script: &str) -> Command {
        self.command_by("lock", options, script)
    }

    fn enter(&self, options: &[&str], script: &str) -> Run {
        Run::of(self.lock(options, script))
    }

    fn lock_output(&self, options: &[&str], script: &str) -> Output {
        self.lock(options, script).output().unwrap()
    }

    fn lock_code(&self, options: &[&str], script: &str) -> Option<i32> {
        self.lock_output(options, script).status.code()
    }

    /// Starts one that [`STAYS`], and waits until it is in.
    async fn stays(&self, who: &str, options: &[&str]) -> Run {
        let identity = format!("--identity={who}");
        let run = self.enter(&[&[identity.as_str()], options].concat(), STAYS);
        self.says("log", &format!("{who} in")).await;
        run
    }

    fn lets_go(&self, who: &str) {
        File::create(self.path(&format!("{who}.go"))).unwrap();
    }

    /// The guards of what [`Self::lock`] starts.
    fn guards_of(&self, kind: Kind) -> PathBuf {
        self.stage.dir().path().join(format!("{}.guard", Key::of(kind, "job")))
    }

    /// Waits until somebody on PostgreSQL waits for the lock. Files do not tell: there it is as far as its guard.
    async fn until_it_waits(&self, run: &Run) {
        until("it has a guard", || guard(run.pid()).is_some()).await;
        until("it waits", || self.stage.waiters_of(Kind::RwLock, "job").is_none_or(|waiters| waiters > 0))
            .await;
    }
}

/// Whether a lock could be had. It is given back.
async fn enters(entered: Result<Option<LockGuard>, LockError>) -> bool {
    match entered.unwrap() {
        Some(guard) => guard.release().await.is_ok(),
        None => false,
    }
}

/// For a script: says whether a process runs beside it. One that waits to be reaped does not.
fn looks_for(pid: &str) -> String {
    format!(
        "case $(cut -d' ' -f3 /proc/{pid}/stat 2> /dev/null) in ''|Z|X) echo alone;; *) echo beside;; esac >> log"
    )
}

/// Keeps the news of a process's death from its guard, for as long as what this gives lives.
fn keeps_from_its_guard(pid: Pid) -> File {
    let heard = fs::read_link(format!("/proc/{}/fd/0", guard(pid).unwrap().as_raw_pid())).unwrap();
    let files = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_pid())).unwrap();
    let mut said = files.filter_map(|entry| Some(entry.ok()?.path()));
    let said = said.find(|path| fs::read_link(path).is_ok_and(|it| it == heard)).unwrap();
    File::options().write(true).open(said).unwrap()
}

/// Whether the guard of a process waits for another one's: proc(5), locks.
fn waits_for_another_guard(pid: Pid) -> bool {
    let Some(guard) = guard(pid) else { return false };
    let (guard, locks) = (guard.as_raw_pid().to_string(), fs::read_to_string("/proc/locks").unwrap());
    let mut waiting = locks.lines().filter(|line| line.contains("-> FLOCK"));
    waiting.any(|line| line.split_whitespace().any(|word| word == guard))
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

async fn on_both_stores(body: impl AsyncFn(Scene)) {
    for stage in [Stage::files(), Stage::postgres()] {
        println!("on {}", stage.kind());
        body(Scene::new(stage)).await;
    }
}

/// C-06, L-03: one at a time, in turn; when the first one's command has ended.
#[tokio::test]
async fn a_command_waits_for_its_turn() {
    on_both_stores(async |scene| {
        let mut a = scene.stays("a", &[]).await;
        scene.lets_go("b");
        let mut b = scene.enter(&["--identity=b"], STAYS);
        scene.until_it_waits(&b).await;
        assert_eq!(scene.lock_code(&["--try"], "echo wrong >> log"), Some(75));
        scene.lets_go("a");
        assert_eq!((a.ended().await, b.ended().await), (Some(0), Some(0)));
        assert_eq!(scene.read("log"), "a in\na out\nb in\nb out\n");
    })
    .await;
}

/// C-06, C-02, L-02, L-04: one attempt, or a limit, which is waited for, and then who has it is told; the command is not
/// started.
#[tokio::test]
async fn who_does_not_wait_longer_is_told_by_the_exit_code() {
    on_both_stores(async |scene| {
        let mut a = scene.stays("a", &[]).await;
        for options in [["--try"].as_slice(), &["--timeout=0s"], &["--try", "--shared"]] {
            let output = scene.lock_output(options, "echo wrong >> log");
            assert_eq!(output.status.code(), Some(75), "{output:?}");
            assert!(stderr(&output).contains("somebody else has the lock"), "{output:?}");
        }
        // So long that the store has half a second to say who it is.
        for options in [["--timeout=1500ms"].as_slice(), &["--timeout=1500ms", "--shared"]] {
            let since = now();
            let output = scene.lock_output(options, "echo wrong >> log");
            assert!(since.elapsed() >= Duration::from_millis(1500), "{:?}", since.elapsed());
            assert_eq!(output.status.code(), Some(75), "{output:?}");
            assert!(stderr(&output).contains("held by a"), "{output:?}");
        }
        scene.lets_go("a");
        assert_eq!(a.ended().await, Some(0));
        assert_eq!(scene.lock_code(&["--timeout=10s"], "echo in time >> log"), Some(0));
        assert_eq!(scene.read("log"), "a in\na out\nin time\n");
    })
    .await;
}

/// C-06, C-02: a store that is not there ends those who do not wait, with a code of its own; the others wait for it, and
/// can be told to stop.
#[tokio::test]
async fn a_store_that_cannot_be_reached_is_waited_for_as_long_as_others_are() {
    let scene = Scene::new(Stage::files());
    let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("postgres://app:hunter2@127.0.0.1:{closed}/app");
    for limit in ["--try", "--timeout=0s", "--timeout=300ms"] {
        let output = scene.lock_output(&["--store", &url, limit], "echo wrong >> log");
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(!stderr(&output).contains("hunter2"), "{output:?}");
    }
    let mut waits = scene.enter(&["--store", &url], "echo wrong >> log");
    until("it has a guard", || guard(waits.pid()).is_some()).await;
    waits.signal(Signal::TERM);
    assert_eq!(waits.ended().await, Some(143));
    assert_eq!(scene.read("log"), "");
}

/// C-06, L-16: those who read are in together, and nobody who writes is in beside them, nor they beside him.
#[tokio::test]
async fn many_read_or_one_writes() {
    on_both_stores(async |scene| {
        let mut a = scene.stays("a", &["--shared"]).await;
        let mut b = scene.stays("b", &["--shared"]).await;
        for remaining in ["a", "b"] {
            assert_eq!(scene.lock_code(&["--try"], "echo wrong >> log"), Some(75), "{remaining} reads");
            assert_eq!(scene.lock_code(&["--try", "--shared"], "exit 4"), Some(4));
            scene.lets_go(remaining);
            let ended = if remaining == "a" { a.ended().await } else { b.ended().await };
            assert_eq!(ended, Some(0));
        }
        let mut c = scene.stays("c", &["--try"]).await;
        assert_eq!(scene.lock_code(&["--try", "--shared"], "echo wrong >> log"), Some(75));
        scene.lets_go("c");
        assert_eq!(c.ended().await, Some(0));
        assert_eq!(scene.lock_code(&["--try", "--shared"], "exit 4"), Some(4));
        assert_eq!(scene.read("log"), "a in\nb in\na out\nb out\nc in\nc out\n");
    })
    .await;
}

/// C-06, L-17: a writer who waits keeps new readers out, and gets in before those who came after.
#[tokio::test]
async fn a_writer_who_waits_gets_in_before_later_readers() {
    on_both_stores(async |scene| {
        let mut a = scene.stays("a", &["--shared"]).await;
        for who in ["w", "b"] {
            scene.lets_go(who);
        }
        let mut w = scene.enter(&["--identity=w"], STAYS);
        let reads = || scene.lock_code(&["--try", "--shared"], "true");
        eventually("a reader is kept out", reads, |code| *code == Some(75)).await;
        let mut b = scene.enter(&["--identity=b", "--shared"], STAYS);
        scene.until_it_waits(&b).await;
        scene.lets_go("a");
        for run in [&mut a, &mut w, &mut b] {
            assert_eq!(run.ended().await, Some(0));
        }
        assert_eq!(scene.read("log"), "a in\na out\nw in\nw out\nb in\nb out\n");
    })
    .await;
}

/// C-02, D39: the command's own code, that of a signal, and those of a command that cannot be executed; the lock is free
/// again after each.
#[tokio::test]
async fn the_exit_code_is_that_of_the_command() {
    on_both_stores(async |scene| {
        for mode in [["--try"].as_slice(), &["--try", "--shared"], &["--try", "--kind=lock"]] {
            for (script, code) in [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137)] {
                assert_eq!(scene.lock_code(mode, script), Some(code), "{script}");
            }
        }
        for (program, code) in [("/nowhere/to/be-found", 127), ("/etc/passwd", 126)] {
            let mut command = Command::new(PROGRAM);
            command.args(["lock", "--try", "job", "--", program]).stdin(Stdio::null());
            scene.set(&mut command);
            let output = command.output().unwrap();
            assert_eq!(output.status.code(), Some(code), "{output:?}");
            assert!(stderr(&output).contains(program), "{output:?}");
        }
        scene.stage.until_nothing_is_held().await;
    })
    .await;
}

/// C-02, C-06: the help has examples; what makes no sense is told, and nothing is started.
#[test]
fn bad_usage_is_told() {
    let scene = Scene::new(Stage::files());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.arg("lock").args(arguments).stdin(Stdio::null());
        scene.set(&mut command);
        command.output().unwrap()
    };
    let write = ["--", "sh", "-c", "echo wrong >> log"];
    let long = "x".repeat(100_000);
    for (arguments, text) in [
        (["--try", "--timeout=1s", "job"].as_slice(), "cannot be used with"),
        (&["--shared", "--kind=lock", "job"], "--shared is for --kind=rwlock"),
        (&["--kind=lease", "job"], "possible values: rwlock, lock"),
        (&["--timeout=soon", "job"], "--timeout"),
        (&["--takeover-delay=5", "job"], "takeover_delay"),
        (&[""], "must not be empty"),
        (&[&long], "name"),
        (&[], "<NAME>"),
    ] {
        let output = run(&[arguments, &write].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains(text), "{output:?}");
    }
    for (arguments, text) in [(["job"].as_slice(), "<COMMAND>"), (&["job", "true"], "put `--` before")] {
        let output = run(arguments);
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains(text), "{output:?}");
    }
    assert_eq!(scene.read("log"), "");
    let help = String::from_utf8(run(&["--help"]).stdout).unwrap();
    assert!(help.contains("Examples:\n  leasehold lock"), "{help}");
}

/// C-05, T-01: who it is, and a token that grows from holder to holder; readers have none, not even that of a command around
/// them.
#[tokio::test]
async fn the_command_knows_for_whom_it_runs() {
    on_both_stores(async |scene| {
        let script =
            "echo $LEASEHOLD_NAME $LEASEHOLD_IDENTITY $LEASEHOLD_TERM ${LEASEHOLD_TOKEN-none} >> log; \
             echo ${LEASEHOLD_FENCE_SQL-none} > fence";
        let mut last = 0;
        for who in ["a", "b"] {
            let identity = format!("--identity={who}");
            assert_eq!(scene.lock_code(&[&identity], script), Some(0));
            let log = scene.read("log");
            let (rest, token) = log.lines().last().unwrap().rsplit_once(' ').unwrap();
            let token = token.parse::<i64>().unwrap();
            assert!(rest == format!("job {who} 1") && token > last, "{log}");
            last = token;
        }
        let status = scene.lock(&["--identity=c", "--shared"], script).env("LEASEHOLD_TOKEN", "7").status();
        assert_eq!(status.unwrap().code(), Some(0));
        assert_eq!(scene.read("log").lines().last(), Some("job c 1 none"));
        // A reader fences all the same.
        let (fence, is_postgres) = (scene.read("fence"), scene.stage.kind() == "PostgreSQL");
        assert_eq!(fence.contains("pg_try_advisory_xact_lock_shared"), is_postgres, "{fence}");
    })
    .await;
}

/// C-05: another one in the command is another process, and is called so; also in that of a reader, which has no token.
#[tokio::test]
async fn one_inside_of_another_has_a_name_of_its_own() {
    let scene = Scene::new(Stage::files());
    for inner in ["lock --shared job", "run inner"] {
        let inner = format!("{PROGRAM} {inner} -- sh -c 'echo $LEASEHOLD_IDENTITY > log'");
        assert_eq!(scene.lock_code(&["--identity=outer", "--shared"], &inner), Some(0));
        let log = scene.read("log");
        assert!(!log.trim().is_empty() && !log.contains("outer"), "{log}");
    }
}

/// C-03, C-02, D37, L-11: the session is ended by the server, or the lock taken away: none of the command's group is alive
/// when this process ends, with the code for it, though the command is content.
#[tokio::test]
async fn a_loss_ends_the_command() {
    // The innermost ignores what it is told.
    let script = "trap 'exit 0' TERM; sh -c 'sh -c \"trap : TERM; echo \\$\\$ > inner; while :; do sleep 0.05; done\" & wait' & wait";
    for mode in [["--identity=a"].as_slice(), &["--identity=a", "--shared"]] {
        on_both_stores(async |scene| {
            let mut run = scene.enter(mode, script);
            let inner = scene.pid("inner").await;
            let key = Key::of(Kind::RwLock, "job");
            if let Stage::Postgres(postgres) = &scene.stage {
                let admin = postgres.database.admin();
                admin.terminate(admin.backends("leasehold/a")[0]);
            } else {
                scene.stage.take_key_away("a", key);
            }
            assert_eq!(run.ended().await, Some(76));
            assert!(!runs(inner), "a part of the command outlives the lock");
            assert_eq!(scene.lock_code(&["--timeout=10s"], "exit 4"), Some(4));
        })
        .await;
    }
}

/// C-04, D38: this process is killed with -9, and its guard hears late of it: on files nobody who is excluded starts a command before
/// the killed one's group is dead. Who reads does not wait for one who has read.
#[tokio::test]
async fn on_files_nobody_starts_beside_the_command_of_a_killed_process() {
    // When its leader dies with its parent, the other one lives on in its group.
    let killed = "sh -c 'trap : TERM; echo $$ > inner; while :; do sleep 0.05; done' & wait";
    let next = looks_for("$(cat inner)");
    for (first, second, waits) in [
        (["--kind=rwlock"].as_slice(), ["--kind=rwlock"].as_slice(), true),
        (&["--kind=rwlock"], &["--shared"], true),
        (&["--shared"], &["--kind=rwlock"], true),
        (&["--shared"], &["--shared"], false),
        (&["--kind=lock"], &["--kind=lock"], true),
    ] {
        println!("{first:?}, {second:?}");
        let scene = Scene::new(Stage::files());
        // What the guard has been told holds for an hour.
        let mut a = scene.enter(&[&["--query-timeout=1h"], first].concat(), killed);
        let inner = scene.pid("inner").await;
        let unheard = keeps_from_its_guard(a.pid());
        let mut b = scene.enter(second, &next);
        a.signal(Signal::KILL);
        a.child.wait().unwrap();
        if waits {
            until("its guard waits for the other one", || waits_for_another_guard(b.pid())).await;
            assert!(runs(inner) && scene.read("log").is_empty());
        } else {
            scene.says("log", "beside").await;
        }
        drop(unheard);
        assert_eq!(b.ended().await, Some(0));
        assert_eq!(scene.read("log"), if waits { "alone\n" } else { "beside\n" });
        until("nothing of it is left", || !runs(inner)).await;
    }
}

/// C-04, D38: this process is killed with -9: its command is dead soon after, on PostgreSQL too, and the next one has its
/// turn.
#[tokio::test]
async fn the_command_of_a_killed_process_is_killed() {
    on_both_stores(async |scene| {
        let mut a = scene.enter(&["--identity=a"], STUBBORN);
        let pid = scene.pid("a").await;
        let mut b = scene.enter(&["--identity=b"], STUBBORN);
        let since = now();
        a.signal(Signal::KILL);
        a.child.wait().unwrap();
        until("its command is dead", || !runs(pid)).await;
        println!("dead {:?} after its wrapper", since.elapsed());
        assert!(runs(scene.pid("b").await));
        b.signal(Signal::TERM);
        assert_eq!(b.ended().await, Some(137));
    })
    .await;
}

/// C-04, D11: this process is stopped: its guard kills the command before the server gives the lock to somebody else, who
/// waits for nothing then.
#[tokio::test]
async fn the_command_of_a_process_that_stands_still_dies_before_another_one_starts() {
    let scene = Scene::new(Stage::postgres());
    let mut a = scene.enter(&["--identity=a"], STUBBORN);
    let pid = scene.pid("a").await;
    let script = format!("{}; {STUBBORN}", looks_for(&pid.as_raw_pid().to_string()));
    let mut b = scene.enter(&["--identity=b", "--shared"], &script);
    a.signal(Signal::STOP);
    scene.pid("b").await;
    assert_eq!(scene.read("log"), "alone\n");
    a.signal(Signal::CONT);
    assert_eq!(a.ended().await, Some(76));
    b.signal(Signal::TERM);
    assert_eq!(b.ended().await, Some(137));
}

/// C-04: the guard that takes the place of one that was killed holds what that one held, together with other readers.
#[tokio::test]
async fn another_guard_of_a_reader_holds_what_the_one_before_it_held() {
    let scene = Scene::new(Stage::files());
    let mut run = scene.stays("a", &["--shared"]).await;
    let file = File::open(scene.guards_of(Kind::RwLock)).unwrap();
    let before = guard(run.pid()).unwrap();
    kill_process(before, Signal::KILL).unwrap();
    let is_another = |it: &Option<Pid>| it.is_some_and(|it| it != before);
    eventually("there is another guard", || guard(run.pid()), is_another).await;
    let is_held = || {
        let is_free = file.try_lock().is_ok();
        if is_free {
            file.unlock().unwrap();
        }
        !is_free
    };
    until("it is held", is_held).await;
    file.try_lock_shared().unwrap();
    file.unlock().unwrap();
    scene.lets_go("a");
    assert_eq!(run.ended().await, Some(0));
    until("it is free", || !is_held()).await;
}

/// C-03, C-04, L-10: told to stop before its turn, it leaves nothing; under its lock, its command is told, and the lock is
/// held until that has ended.
#[tokio::test]
async fn a_signal_ends_who_waits_and_who_is_in() {
    on_both_stores(async |scene| {
        let script = format!("trap 'echo told >> log' TERM; {STAYS}; exit 7");
        let mut a = scene.enter(&["--identity=a", "--stop-grace=1h"], &script);
        scene.says("log", "a in").await;
        for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129)] {
            for mode in [["--timeout=1h"].as_slice(), &["--shared"]] {
                let mut waits = scene.enter(mode, "echo wrong >> log");
                scene.until_it_waits(&waits).await;
                waits.signal(signal);
                assert_eq!(waits.ended().await, Some(code));
                scene.stage.until_nobody_waits_of(Kind::RwLock, "job").await;
            }
        }
        a.signal(Signal::TERM);
        scene.says("log", "told").await;
        assert_eq!(scene.lock_code(&["--try"], "echo wrong >> log"), Some(75));
        scene.lets_go("a");
        assert_eq!(a.ended().await, Some(7));
        assert_eq!(scene.read("log"), "a in\ntold\na out\n");
        scene.stage.until_nothing_is_held().await;
    })
    .await;
}

/// C-03, C-04: in, but not yet started, since it waits for the guard of one before it, or for what it was asked to: told to
/// stop, it starts nothing.
#[tokio::test]
async fn a_signal_before_the_command_starts_is_not_too_late() {
    let scene = Scene::new(Stage::files());
    // Without an earlier one there is no directory.
    assert_eq!(scene.lock_code(&[], "true"), Some(0));
    let file = File::open(scene.guards_of(Kind::RwLock)).unwrap();
    file.lock().unwrap();
    let mut waits = scene.enter(&[], "echo wrong >> log");
    until("it waits for the file", || waits_for_another_guard(waits.pid())).await;
    waits.signal(Signal::TERM);
    assert_eq!(waits.ended().await, Some(143));
    drop(file);

    let is_in = || scene.lock_code(&["--try"], "true") == Some(75);
    let mut waits = scene.enter(&["--takeover-delay=1h"], "echo wrong >> log");
    until("it is in", is_in).await;
    waits.signal(Signal::TERM);
    assert_eq!(waits.ended().await, Some(143));

    let mut waits = scene.enter(&["--takeover-delay=1h", "--identity=a"], "echo wrong >> log");
    until("it is in", is_in).await;
    scene.stage.take_key_away("a", Key::of(Kind::RwLock, "job"));
    assert_eq!(waits.ended().await, Some(76));
    assert_eq!(scene.read("log"), "");
}

/// C-04, C-06: a lock waits for no takeover unless it is asked to, and then each time.
#[tokio::test]
async fn a_takeover_delay_is_waited_where_it_is_asked_for() {
    on_both_stores(async |scene| {
        for _ in 0..2 {
            let since = now();
            assert_eq!(scene.lock_code(&["--takeover-delay=300ms"], "true"), Some(0));
            assert!(since.elapsed() >= Duration::from_millis(300), "{:?}", since.elapsed());
        }
    })
    .await;
}

/// C-06, L-15: each kind is the library's lock of that name, and excludes no other kind.
#[tokio::test]
async fn each_kind_is_one_of_the_librarys_locks() {
    on_both_stores(async |scene| {
        let locker = scene.stage.locker(quick("library"));
        let (lock, rw_lock) = (locker.lock("job"), locker.rw_lock("job"));
        let codes = || {
            [["--kind=lock"].as_slice(), &[], &["--kind=rwlock"], &["--shared"]]
                .map(|kind| scene.lock_code(&[&["--try"], kind].concat(), "true").unwrap())
        };
        let held = lock.lock().await.unwrap();
        assert_eq!(codes(), [75, 0, 0, 0]);
        held.release().await.unwrap();
        let held = rw_lock.write().await.unwrap();
        assert_eq!(codes(), [0, 75, 75, 75]);
        held.release().await.unwrap();
        let held = rw_lock.read().await.unwrap();
        assert_eq!(codes(), [0, 75, 75, 0]);
        held.release().await.unwrap();
        assert_eq!(codes(), [0, 0, 0, 0]);

        for (who, kind, free) in [
            ("a", ["--kind=lock"].as_slice(), (false, true, true)),
            ("b", &[], (true, false, false)),
            ("c", &["--shared"], (true, true, false)),
        ] {
            let mut run = scene.stays(who, kind).await;
            let is_free = (
                enters(lock.try_lock().await).await,
                enters(rw_lock.try_read().await).await,
                enters(rw_lock.try_write().await).await,
            );
            assert_eq!(is_free, free, "{kind:?}");
            scene.lets_go(who);
            assert_eq!(run.ended().await, Some(0));
        }
        locker.close().await;
    })
    .await;
}

/// C-06: `key` tells the number of each, by which the store knows it.
#[tokio::test]
async fn the_key_of_a_lock_is_told() {
    let scene = Scene::new(Stage::postgres());
    let Stage::Postgres(postgres) = &scene.stage else { unreachable!("it was made so") };
    for (who, kind) in [("a", "rwlock"), ("b", "lock")] {
        let mut run = scene.stays(who, &[&format!("--kind={kind}")]).await;
        let output = scene.script(&format!("leasehold key job --kind {kind} | head -1")).output().unwrap();
        let key = String::from_utf8(output.stdout).unwrap().trim().parse().unwrap();
        assert!(postgres.database.admin().holder(key).is_some());
        scene.lets_go(who);
        assert_eq!(run.ended().await, Some(0));
        assert!(postgres.database.admin().holder(key).is_none());
    }
}

/// C-08: it is part of a pipeline as its command is: what goes in and comes out is the command's, also where nobody reads.
#[tokio::test]
async fn it_is_part_of_a_pipeline() {
    let scene = Scene::new(Stage::files());
    let script = "printf 'one\ntwo\n' | leasehold lock -q job -- cat | leasehold lock -q other -- tr a-z A-Z";
    let output = scene.script(script).output().unwrap();
    assert_eq!(
        (output.status.code(), &*output.stdout, &*output.stderr),
        (Some(0), &b"ONE\nTWO\n"[..], &b""[..])
    );
    let output = scene.script("leasehold lock -q job -- yes | head -1").output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout, &*output.stderr), (Some(0), &b"y\n"[..], &b""[..]));
    assert_eq!(scene.lock_code(&["--timeout=10s"], "exit 4"), Some(4));
}
