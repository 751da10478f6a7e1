//! `leasehold run` and what it starts: what the command inherits, what it leaves behind, and PID 1.

use std::fs::{self, File};
use std::io::{Read as _, Write as _};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::thread;

use leasehold::{Key, Kind};
use rustix::process::{Pid, Signal, kill_process};

use crate::support::command::{PROGRAM, Run, Scene, processes, runs};
use crate::support::{Stage, eventually, until};

/// Signals as they are for a program that nobody has prepared.
const PLAIN: &[&str] = &["--default-signal"];

/// Those of whom a shell has started in the background and nohup(1) as well, and who was started in the middle of a
/// thread that is not to be disturbed.
const PREPARED: &[&str] =
    &["--default-signal", "--ignore-signal=HUP,INT,QUIT,USR2", "--block-signal=CHLD,USR1,TERM,TTOU"];

impl Scene {
    /// `env OPTIONS… leasehold run job -- COMMAND…`
    fn prepared(&self, options: &[&str], command: &[&str]) -> Command {
        let mut env = Command::new("env");
        env.args(options).args([PROGRAM, "run", "job", "--"]).args(command).stdin(Stdio::null());
        self.set(&mut env);
        env
    }

    /// What the guards of the job hold one after the other.
    fn guard_file(&self) -> PathBuf {
        self.stage.dir().path().join(format!("{}.guard", Key::of(Kind::Lease, "job")))
    }
}

/// The files that a process has open, by name; pipes too.
pub(crate) fn open_files(pid: Pid) -> Vec<PathBuf> {
    let Ok(entries) = fs::read_dir(format!("/proc/{}/fd", pid.as_raw_pid())) else { return Vec::new() };
    entries.filter_map(|entry| fs::read_link(entry.ok()?.path()).ok()).collect()
}

fn children(pid: Pid) -> Vec<Pid> {
    let text = fs::read_to_string(format!("/proc/{0}/task/{0}/children", pid.as_raw_pid())).unwrap();
    text.split_whitespace().map(|pid| Pid::from_raw(pid.parse().unwrap()).unwrap()).collect()
}

/// Whether it has a handler for USR2, the last of those that are passed on.
fn hears(pid: Pid) -> bool {
    let status = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_pid())).unwrap();
    let caught = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap();
    u64::from_str_radix(caught.trim(), 16).unwrap() >> (Signal::USR2.as_raw() - 1) & 1 == 1
}

/// The guard of a process: of its children, the one that is called so.
pub(crate) fn guard(pid: Pid) -> Option<Pid> {
    children(pid).into_iter().find(|child| {
        let line = fs::read(format!("/proc/{}/cmdline", child.as_raw_pid())).unwrap_or_default();
        line.split(|&byte| byte == 0).nth(1) == Some(b"guard")
    })
}

/// C-03, C-08: what leaves the group is the command's own to end: nobody waits for it. The caller's pipe stays open for
/// that reason alone.
#[tokio::test]
async fn a_daemon_outlives_the_command_and_holds_up_nobody() {
    let scene = Scene::new(Stage::files());
    let script = "setsid sh -c 'echo $$ > new; mv new daemon; exec sleep 60' & \
                  while ! [ -e daemon ]; do sleep 0.02; done; exit 5";
    let mut command = scene.command(&[], script);
    let mut run = Run::of_piped(command.stdout(Stdio::piped()).stderr(Stdio::piped()));
    assert_eq!(run.ended().await, Some(5));
    assert!(scene.stage.is_free("job"));
    let daemon = scene.pid("daemon").await;
    assert!(runs(daemon));
    let me = rustix::process::getpid();
    let pipe = |n: i32| fs::read_link(format!("/proc/{}/fd/{n}", daemon.as_raw_pid())).unwrap();
    for pipe in [pipe(1), pipe(2)] {
        let holders: Vec<_> =
            processes().into_iter().filter(|&pid| pid != me && open_files(pid).contains(&pipe)).collect();
        assert_eq!(holders, [daemon], "{}", pipe.display());
    }
    kill_process(daemon, Signal::KILL).unwrap();
    // It is its end that ends these.
    run.child.stdout.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
    run.child.stderr.take().unwrap().read_to_end(&mut Vec::new()).unwrap();
}

/// C-08: the guard keeps nothing of the caller's to itself: not its input and output while it runs, and nothing at all
/// when the process has ended.
#[tokio::test]
async fn the_guard_holds_nothing_of_the_callers() {
    let scene = Scene::new(Stage::files());
    for n in 0..10 {
        let mut command = scene.command(&[], &format!("echo {n} > log; exec sleep 60"));
        let mut run = Run::of_piped(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        scene.says("log", &n.to_string()).await;
        let guard = guard(run.pid()).expect("there is a guard");
        let descriptor = |n: i32| fs::read_link(format!("/proc/{}/fd/{n}", run.pid().as_raw_pid())).unwrap();
        for n in [0, 1] {
            assert!(!open_files(guard).contains(&descriptor(n)));
        }
        run.signal(Signal::TERM);
        // At once: a lock that is passed down by a descriptor is to be free when the process has ended.
        assert_eq!(run.child.wait().unwrap().code(), Some(143));
        assert!(!runs(guard));
    }
}

/// C-08: the command closes its output, and goes on.
#[tokio::test]
async fn a_command_that_closes_its_output_goes_on() {
    let scene = Scene::new(Stage::files());
    let output = scene.output(&[], "echo out; exec >&- 2>&-; echo closed > log; exit 4");
    assert_eq!(output.status.code(), Some(4));
    assert_eq!((output.stdout.as_slice(), scene.read("log").as_str()), (&b"out\n"[..], "closed\n"));
}

/// C-08: in a pipe, what comes in reaches the command, and nobody else.
#[tokio::test]
async fn the_command_reads_all_of_its_input() {
    let scene = Scene::new(Stage::files());
    let data: Vec<u8> = (0..250_000_u32).flat_map(u32::to_le_bytes).collect();
    let mut command = scene.command_of(&["cat"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
    let (mut stdin, to_write) = (child.stdin.take().unwrap(), data.clone());
    let writer = thread::spawn(move || stdin.write_all(&to_write).unwrap());
    let output = child.wait_with_output().unwrap();
    writer.join().unwrap();
    assert!(output.status.success());
    assert!(output.stdout == data, "{} bytes of {}", output.stdout.len(), data.len());
}

/// C-08, D39: nobody reads any more: the command is ended by SIGPIPE, as it would be without us.
#[tokio::test]
async fn a_command_whose_output_nobody_reads_ends() {
    let scene = Scene::new(Stage::files());
    let output =
        scene.script("{ leasehold --quiet run job -- yes; echo $? > code; } | head -1").output().unwrap();
    assert_eq!((output.stdout.as_slice(), scene.read("code").as_str()), (&b"y\n"[..], "141\n"), "{output:?}");
    assert!(output.stderr.is_empty() && scene.stage.is_free("job"), "{output:?}");
}

/// C-04, D38: nobody reads the standard error any more: the guard kills the command all the same, also
/// one that took another one's place; and what cannot be executed has the same code where it is closed.
#[tokio::test]
async fn nobody_needs_to_read_what_is_said() {
    let scene = Scene::new(Stage::files());
    let mut command = scene.command(&[], "echo $$ > pid; exec sleep 60");
    let mut run = Run::of_piped(command.stderr(Stdio::piped()));
    let pid = scene.pid("pid").await;
    drop(run.child.stderr.take());
    run.signal(Signal::KILL);
    until("its command is dead", || !runs(pid)).await;

    let mut command = scene.command(&[], "echo $$ > second; exec sleep 60");
    let mut run = Run::of_piped(command.stderr(Stdio::piped()));
    let pid = scene.pid("second").await;
    drop(run.child.stderr.take());
    let before = guard(run.pid()).unwrap();
    kill_process(before, Signal::KILL).unwrap();
    let is_another = |it: &Option<Pid>| it.is_some_and(|it| it != before);
    eventually("there is another guard", || guard(run.pid()), is_another).await;
    run.signal(Signal::KILL);
    until("its command is dead", || !runs(pid)).await;

    scene.script("leasehold --quiet run job -- /nowhere 2>&-; echo $? > code").status().unwrap();
    assert_eq!(scene.read("code"), "127\n");
}

/// C-08: started with all its standard streams closed.
#[tokio::test]
async fn closed_streams_are_no_obstacle() {
    let scene = Scene::new(Stage::files());
    let script =
        "leasehold run job -- sh -c 'echo in; cat; echo out >&2; echo ran > log; exit 6' <&- >&- 2>&-";
    let status = scene.script(script).status().unwrap();
    assert_eq!((status.code(), scene.read("log").as_str()), (Some(6), "ran\n"));
}

/// C-08, C-05: as cron starts it, in a session without a terminal: the command gets that environment and folder, and what
/// says which lease it has.
#[tokio::test]
async fn it_works_as_cron_starts_it() {
    let scene = Scene::new(Stage::files());
    let store = scene.stage.url();
    let given = [
        "HOME=/",
        "LOGNAME=nobody",
        "PATH=/usr/bin:/bin",
        "SHELL=/bin/sh",
        &format!("LEASEHOLD_STORE={store}"),
    ];
    let mut command = Command::new("setsid");
    command.args(["--wait", "env", "-i"]).args(given).args([
        PROGRAM,
        "run",
        "job",
        "--",
        "sh",
        "-c",
        "pwd; exec env",
    ]);
    let output = command.current_dir("/").stdin(Stdio::null()).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8(output.stdout).unwrap();
    let (folder, environment) = text.split_once('\n').unwrap();
    assert_eq!(folder, "/");
    let ours = ["LEASEHOLD_IDENTITY=", "LEASEHOLD_NAME=job", "LEASEHOLD_TERM=1", "LEASEHOLD_TOKEN="];
    let (said, mut rest): (Vec<_>, Vec<_>) =
        // The shell sets one of its own.
        environment.lines().filter(|line| !line.starts_with("PWD=")).partition(|line| ours.iter().any(|it| line.starts_with(it)));
    assert!(said.len() == ours.len(), "{said:?}");
    rest.sort_unstable();
    let mut given = given.map(str::to_owned);
    given.sort_unstable();
    assert_eq!(rest, given);
}

/// C-08, D38: signals that were ignored or blocked are so for the command, and no others; in both cases it runs and ends.
/// The descriptors that it inherits are those that it would have without us.
#[tokio::test]
async fn the_command_inherits_what_it_would_without_us() {
    for options in [PLAIN, PREPARED] {
        let scene = Scene::new(Stage::files());
        for shown in [&["grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status"][..], &["ls", "/proc/self/fd"]] {
            let with = |mut command: Command| {
                command.env("LEASEHOLD_LOG", "error");
                let output = command.output().unwrap();
                assert!(output.status.success(), "{output:?}");
                String::from_utf8(output.stdout).unwrap()
            };
            let mut without_us = Command::new("env");
            without_us.args(options).args(shown).stdin(Stdio::null());
            assert_eq!(with(scene.prepared(options, shown)), with(without_us), "{options:?}");
        }
    }
    let scene = Scene::new(Stage::files());
    let script = "exec 3> three; exec leasehold run job -- sh -c 'echo hello >&3'";
    assert!(scene.script(script).status().unwrap().success());
    assert_eq!(scene.read("three"), "hello\n");
}

/// C-04, D38: what is ignored, as of nohup(1), ends nothing; what was blocked when it started still ends it.
#[tokio::test]
async fn a_signal_that_is_ignored_is_not_passed_on() {
    let scene = Scene::new(Stage::files());
    let script = "echo $$ > pid; while :; do echo tick >> ticks; sleep 0.02; done";
    let mut run = Run::of(scene.prepared(PREPARED, &["sh", "-c", script]));
    let pid = scene.pid("pid").await;
    for signal in [Signal::HUP, Signal::INT, Signal::QUIT, Signal::USR2] {
        run.signal(signal);
        kill_process(pid, signal).unwrap();
    }
    let before = scene.read("ticks").lines().count();
    until("it goes on", || scene.read("ticks").lines().count() > before + 10).await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(143));
    assert!(!runs(pid) && scene.stage.is_free("job"));
}

/// C-04: a signal that comes when the lease is there, and the command not yet: it never starts.
#[tokio::test]
async fn a_signal_between_the_lease_and_the_command() {
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129), (Signal::QUIT, 131)] {
        let scene = Scene::new(Stage::files());
        // Until the guard has that, no command is started.
        let file = File::create(scene.guard_file()).unwrap();
        file.lock().unwrap();
        let mut run = scene.start(&[], "echo wrong > log");
        until("it leads", || !scene.stage.is_free("job")).await;
        let guard = guard(run.pid()).expect("there is a guard");
        run.signal(Signal::USR1);
        run.signal(signal);
        assert_eq!(run.ended().await, Some(code));
        assert!(scene.stage.is_free("job") && !runs(guard));
        assert_eq!(scene.read("log"), "");
    }
}

/// C-04: who stands by is ended by what ends it, and has nobody to pass the rest on to.
#[tokio::test]
async fn signals_while_standing_by() {
    let scene = Scene::new(Stage::files());
    let mut leader = scene.start(&[], "echo leads >> log; exec sleep 60");
    scene.says("log", "leads").await;
    for (signal, code) in [(Signal::TERM, 143), (Signal::INT, 130), (Signal::HUP, 129), (Signal::QUIT, 131)] {
        let mut standby = scene.start(&[], "echo wrong >> log");
        until("it hears signals", || hears(standby.pid())).await;
        standby.signal(Signal::USR1);
        standby.signal(signal);
        assert_eq!(standby.ended().await, Some(code));
    }
    let mut standby =
        scene.start(&[], "trap 'echo USR1 >> log' USR1; echo leads too >> log; sleep 0.1; exit 9");
    until("it hears signals", || hears(standby.pid())).await;
    standby.signal(Signal::USR1);
    standby.signal(Signal::USR2);
    leader.signal(Signal::TERM);
    assert_eq!(leader.ended().await, Some(143));
    assert_eq!(standby.ended().await, Some(9));
    assert_eq!(scene.read("log"), "leads\nleads too\n");
}

/// C-04, C-03: signals that come faster than the lease is looked at do not keep the guard from hearing of it: it kills
/// nothing, for longer than it would wait.
#[tokio::test]
async fn a_storm_of_signals() {
    let scene = Scene::new(Stage::postgres());
    let script = "trap 'echo USR1 >> log' USR1; echo ready >> log; while :; do sleep 0.02; done";
    let mut run = scene.start(&[], script);
    scene.says("log", "ready").await;
    for _ in 0..100 {
        run.signal(Signal::USR1);
    }
    scene.says("log", "USR1").await;
    // Trust lasts 2 s here, and the grace half a second.
    let since = crate::support::now();
    until("time passes", || {
        run.signal(Signal::USR1);
        since.elapsed() > std::time::Duration::from_secs(4)
    })
    .await;
    let before = scene.read("log").len();
    run.signal(Signal::USR1);
    until("it still hears", || scene.read("log").len() > before).await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(143));
}

/// C-01: the program's file is replaced while it runs, as at an upgrade: it can still start what it has to.
#[tokio::test]
async fn it_outlives_its_own_file() {
    let scene = Scene::new(Stage::files());
    let copy = scene.path("leasehold");
    fs::copy(PROGRAM, &copy).unwrap();
    let script =
        "echo run >> log; [ -e go ] || while ! [ -e go ]; do sleep 0.02; done; test $(wc -l < log) -ge 2";
    let mut command = Command::new(&copy);
    command.args(["run", "--restart", "job", "--", "sh", "-c", script]).stdin(Stdio::null());
    scene.set(&mut command);
    let mut run = Run::of(command);
    scene.says("log", "run").await;
    fs::remove_file(&copy).unwrap();
    fs::write(scene.path("go"), "").unwrap();
    assert_eq!(run.ended().await, Some(0));
    assert_eq!(scene.read("log"), "run\nrun\n");
}

impl Scene {
    /// As the first process of a namespace of its own. The one outside only waits for it.
    fn as_pid_1(&self, script: &str) -> Run {
        let mut command = Command::new("unshare");
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child", "env", "--default-signal"]);
        command.args([PROGRAM, "run", "job", "--", "sh", "-c", script]).stdin(Stdio::null());
        self.set(&mut command);
        Run::of(command)
    }
}

/// C-08, D40: as PID 1 of a container it takes TERM, and reaps whom nobody else does, also those that have left the group;
/// its code is the command's.
#[tokio::test]
async fn it_works_as_pid_1() {
    let scene = Scene::new(Stage::files());
    let script = "for n in 1 2 3 4 5; do sh -c 'sleep 0.05 &'; setsid sh -c 'sleep 0.05 &'; done; echo ready > log; \
                  while :; do sleep 0.05; ps -A -o stat= | grep -c Z > zombies; done";
    let mut run = scene.as_pid_1(script);
    scene.says("log", "ready").await;
    until("the orphans are reaped", || scene.read("zombies").trim() == "0").await;
    // unshare(1) ignores it; its child, PID 1 of the namespace, is told directly.
    let [first] = children(run.pid())[..] else { panic!("unshare has one child") };
    kill_process(first, Signal::TERM).unwrap();
    assert_eq!(run.ended().await, Some(143));
    assert!(scene.stage.is_free("job"));
    assert_eq!(scene.as_pid_1("echo $$ > pid; exit 8").ended().await, Some(8));
    assert!(scene.stage.is_free("job"));
}

/// C-08, C-04: PID 1 is killed: with it goes all that it has started, whatever group that is in; and the next one leads.
#[tokio::test]
async fn pid_1_is_killed() {
    let scene = Scene::new(Stage::files());
    let script = "setsid sh -c 'echo mark > own; exec sleep 60' & echo ready > log; trap : TERM; \
                  while :; do sleep 0.05; done";
    let mut run = scene.as_pid_1(script);
    scene.says("log", "ready").await;
    scene.says("own", "mark").await;
    let [first] = children(run.pid())[..] else { panic!("unshare has one child") };
    let namespace = |pid: Pid| fs::read_link(format!("/proc/{}/ns/pid", pid.as_raw_pid())).ok();
    let theirs = namespace(first);
    kill_process(first, Signal::KILL).unwrap();
    run.ended().await;
    until("nobody is left", || !processes().into_iter().any(|pid| runs(pid) && namespace(pid) == theirs))
        .await;
    assert_eq!(scene.code(&[], "exit 8"), Some(8));
}
