//! The guard of `leasehold run`, and what is started in the place of its command: where one of them is killed, stopped or
//! late, in any order.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::time::Duration;

use leasehold::{Key, Kind};
use rustix::process::{Pid, Signal, kill_process};

use crate::command_children::{guard, open_files};
use crate::support::command::{PROGRAM, Run, Scene, runs, state};
use crate::support::{Stage, eventually, now, until};

/// What the guards of the job hold one after the other.
fn guard_file(scene: &Scene) -> PathBuf {
    scene.stage.dir().path().join(format!("{}.guard", Key::of(Kind::Lease, "job")))
}

async fn another_guard(run: &Run, before: Pid) -> Pid {
    let is_another = |it: &Option<Pid>| it.is_some_and(|it| it != before);
    eventually("there is another guard", || guard(run.pid()), is_another).await.unwrap()
}

/// C-01, F-37: the lease goes back and forth between two processes that go on living: the command of each runs when it
/// leads.
#[tokio::test]
async fn the_command_starts_again_when_leadership_comes_back() {
    for stage in [Stage::files(), Stage::postgres()] {
        let scene = Scene::new(stage);
        let script = "echo $LEASEHOLD_IDENTITY >> log; exec sleep 60";
        let mut first = scene.start(&["--identity=a"], script);
        scene.says("log", "a").await;
        let mut second = scene.start(&["--identity=b"], script);
        // Who has it next, a busy machine decides: the one that stepped down asks again soon.
        let has_led_twice = |who: &str| scene.read("log").lines().filter(|it| *it == who).count() > 1;
        let mut rounds = 1;
        while !(has_led_twice("a") && has_led_twice("b")) {
            assert!(rounds < 30, "{}", scene.read("log"));
            let stands_by = || {
                let output = scene.script("leasehold status job --json").output().unwrap();
                String::from_utf8(output.stdout).unwrap()
            };
            eventually("one stands by", stands_by, |it| !it.contains("\"standbys\":[]")).await;
            assert!(scene.script("leasehold step-down job").status().unwrap().success());
            rounds += 1;
            until("the next one runs", || scene.read("log").lines().count() == rounds).await;
        }
        first.signal(Signal::TERM);
        first.ended().await;
        second.signal(Signal::TERM);
        assert_eq!(second.ended().await, Some(143));
    }
}

/// C-04: the guard that takes the place of one that was killed holds what that one held: whoever leads next waits for it.
#[tokio::test]
async fn a_guard_holds_what_the_one_before_it_held() {
    let scene = Scene::new(Stage::files());
    let run = scene.start(&[], "echo $$ > pid; exec sleep 60");
    let pid = scene.pid("pid").await;
    let file = File::open(guard_file(&scene)).unwrap();
    file.try_lock().unwrap_err();
    let before = guard(run.pid()).unwrap();
    kill_process(before, Signal::KILL).unwrap();
    another_guard(&run, before).await;
    let is_held = || {
        let is_free = file.try_lock().is_ok();
        if is_free {
            file.unlock().unwrap();
        }
        !is_free
    };
    until("it is held", is_held).await;
    run.signal(Signal::KILL);
    until("its command is dead", || !runs(pid)).await;
    until("it is free", || !is_held()).await;
}

/// C-04: a guard that was stopped has missed nothing of what it was told: it kills nothing that it should not.
#[tokio::test]
async fn a_guard_that_was_stopped_kills_nothing() {
    let scene = Scene::new(Stage::postgres());
    let mut run = scene.start(&[], "while :; do echo tick >> ticks; sleep 0.02; done");
    until("it ticks", || scene.read("ticks").lines().count() > 2).await;
    let guard = guard(run.pid()).unwrap();
    kill_process(guard, Signal::STOP).unwrap();
    // Trust lasts 2 s here, and the grace half a second.
    let since = now();
    until("time passes", || since.elapsed() > Duration::from_secs(4)).await;
    kill_process(guard, Signal::CONT).unwrap();
    until("it runs again", || state(guard) == Some('S')).await;
    let before = scene.read("ticks").lines().count();
    until("it ticks on", || scene.read("ticks").lines().count() > before + 50).await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(143));
}

/// C-04: the guard is killed while it waits for the one before it: there is another one, and no command before that has
/// what it waits for.
#[tokio::test]
async fn a_guard_that_is_killed_while_it_waits_is_replaced() {
    let scene = Scene::new(Stage::files());
    let file = File::create(guard_file(&scene)).unwrap();
    file.lock().unwrap();
    let mut run = scene.start(&[], "echo ran >> log");
    until("it leads", || !scene.stage.is_free("job")).await;
    let waits = eventually("there is a guard", || guard(run.pid()), Option::is_some).await.unwrap();
    // It has the file open when it waits for it.
    let path = guard_file(&scene);
    let has_it = || open_files(waits).contains(&path);
    until("it waits", has_it).await;
    kill_process(waits, Signal::KILL).unwrap();
    another_guard(&run, waits).await;
    assert_eq!(scene.read("log"), "");
    file.unlock().unwrap();
    assert_eq!((run.ended().await, scene.read("log").as_str()), (Some(0), "ran\n"));
}

/// C-04, C-08: whatever the directory is called.
#[tokio::test]
async fn a_directory_may_have_any_name() {
    let scene = Scene::new(Stage::files());
    for name in [&b"two\nlines"[..], b" blanks ", b"\xff"] {
        let dir = scene.dir.path().join(OsStr::from_bytes(name));
        fs::create_dir(&dir).unwrap();
        let mut command = scene.command(&[], "echo ran > ran");
        command.env("LEASEHOLD_STORE", "file:leases").current_dir(&dir);
        assert_eq!(command.status().unwrap().code(), Some(0), "{}", dir.display());
        assert!(dir.join("ran").exists());
        let guards = fs::read_dir(dir.join("leases")).unwrap();
        let is_guard = |entry: &fs::DirEntry| entry.path().extension() == Some(OsStr::new("guard"));
        assert_eq!(guards.map(Result::unwrap).filter(is_guard).count(), 1);
    }
}

/// C-04, C-08: this process is killed before it has let its command go on, under nohup(1), where the kernel's HUP ends
/// nothing: the command never starts, and nothing of it is left.
#[tokio::test]
async fn what_was_not_let_go_on_never_starts() {
    let scene = Scene::new(Stage::files());
    let script = format!(
        "echo $$ > parent; nohup {PROGRAM} exec $$ -- sh -c 'echo wrong > log' & echo $! > pid; wait"
    );
    let mut parent = Run::of_piped(
        std::process::Command::new("setsid").args(["sh", "-c", &script]).current_dir(scene.dir.path()),
    );
    let pid = scene.pid("pid").await;
    until("it stands still", || state(pid) == Some('T')).await;
    kill_process(scene.pid("parent").await, Signal::KILL).unwrap();
    parent.ended().await;
    until("it is gone", || !runs(pid)).await;
    assert_eq!(scene.read("log"), "");
    // And where the parent is dead already.
    let status = scene.script("leasehold exec 0 -- sh -c 'echo wrong > log'").status().unwrap();
    assert_eq!((status.code(), scene.read("log").as_str()), (Some(76), ""));
}

/// C-04: this process is killed while its guard stands still: the command itself dies all the same; and so does what it has
/// started, since the kernel lets the guard go on, which outlives the HUP that comes with that.
#[tokio::test]
async fn a_command_dies_also_where_the_guard_stands_still() {
    let scene = Scene::new(Stage::files());
    let script = "sh -c 'trap : TERM; echo $$ > inner; while :; do sleep 0.05; done' & echo $$ > pid; wait";
    let run = scene.start(&[], script);
    let (pid, inner) = (scene.pid("pid").await, scene.pid("inner").await);
    let guard = guard(run.pid()).unwrap();
    kill_process(guard, Signal::STOP).unwrap();
    until("it stands still", || state(guard) == Some('T')).await;
    run.signal(Signal::KILL);
    until("its command is dead", || !runs(pid)).await;
    until("all that it has started is dead", || !runs(inner)).await;
    until("the guard has ended", || !runs(guard)).await;
}

/// C-06: an option's value is that option's alone; and not to wait at all is to ask once.
#[tokio::test]
async fn what_is_given_means_what_it_says() {
    let scene = Scene::new(Stage::files());
    for option in ["--identity=a,answer_step_down=false", "--retry-interval=1s,query_timeout=1s"] {
        let output = scene.output(&[option], "echo wrong > log");
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("must not contain ','"), "{output:?}");
    }
    assert_eq!(scene.code(&["--wait=0s"], "exit 4"), Some(4));
    let _leader = scene.start(&[], "echo leads >> log; exec sleep 60");
    scene.says("log", "leads").await;
    assert_eq!(scene.code(&["--wait=0s"], "echo wrong >> log"), Some(75));
    assert_eq!(scene.read("log"), "leads\n");
}
