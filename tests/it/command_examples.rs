//! The examples of the command line in `examples/command`, as they stand there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};

use crate::support::Stage;
use crate::support::command::{Run, Scene};

fn example(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/command").join(name)
}

/// The words of the only line of an example that begins like this.
fn line(name: &str, start: &str) -> String {
    let text = fs::read_to_string(example(name)).unwrap();
    let [line] = text.lines().filter_map(|line| line.strip_prefix(start)).collect::<Vec<_>>()[..] else {
        panic!("{name} has no one line with {start:?}")
    };
    line.to_owned()
}

/// C-08: the job for a crontab succeeds where it runs, and where another one does; it fails where the store is no use.
#[tokio::test]
async fn nightly() {
    let scene = Scene::new(Stage::files());
    let nightly = || {
        let mut command = Command::new(example("nightly.sh"));
        command.env("LEASEHOLD_IDENTITY", "this-host").stdin(Stdio::null());
        scene.set(&mut command);
        command
    };
    let output = nightly().output().unwrap();
    assert_eq!(
        (output.status.code(), &*output.stdout),
        (Some(0), &b"cleaning up, as this-host\n"[..]),
        "{output:?}"
    );
    assert!(output.stderr.is_empty(), "cron would write a mail: {output:?}");

    let mut leader = Run::of({
        let mut command = Command::new("leasehold");
        command.args(["run", "nightly-cleanup", "--", "sh", "-c", "echo leads > log; exec sleep 60"]);
        scene.set(&mut command);
        command
    });
    scene.says("log", "leads").await;
    let output = nightly().output().unwrap();
    assert_eq!((output.status.code(), &*output.stdout, &*output.stderr), (Some(0), &b""[..], &b""[..]));
    leader.signal(Signal::TERM);
    assert_eq!(leader.ended().await, Some(143));

    let output = nightly().env("LEASEHOLD_STORE", "file:/dev/null/no").output().unwrap();
    assert!(!output.status.success() && !output.stderr.is_empty(), "{output:?}");
}

/// C-08: what the container starts, as the first process of a namespace: it runs the command that the image comes with, and
/// ends it when it is told to stop.
#[tokio::test]
async fn entrypoint() {
    let words =
        |start| -> Vec<String> { serde_json::from_str(&line("entrypoint.Dockerfile", start)).unwrap() };
    let (entrypoint, mut command) = (words("ENTRYPOINT "), words("CMD "));
    // Its output goes where the test can read it.
    let script = command.pop().unwrap();
    command.push(format!("exec > log; {script}"));
    let scene = Scene::new(Stage::files());
    let mut unshare = Command::new("unshare");
    unshare.args(["--pid", "--fork", "--mount-proc", "--kill-child", "env", "--default-signal"]);
    unshare.args(entrypoint).args(command).stdin(Stdio::null());
    scene.set(&mut unshare);
    let mut run = Run::of(unshare);
    scene.says("log", "sweeping").await;
    let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", run.child.id())).unwrap();
    let first = Pid::from_raw(children.trim().parse().unwrap()).unwrap();
    kill_process(first, Signal::TERM).unwrap();
    assert_eq!(run.ended().await, Some(143));
    assert!(scene.stage.is_free("sweeper"));
}

/// C-08: what systemd starts: it starts the program again, which `KillMode=mixed` ends through it alone; and the unit is not
/// started again for bad usage.
#[tokio::test]
async fn unit() {
    let scene = Scene::new(Stage::files());
    let start = line("sweeper.service", "ExecStart=");
    let mut words: Vec<_> = start.split(' ').collect();
    assert_eq!(words.pop(), Some("/opt/app/sweep"));
    let program = words.remove(0);
    assert_eq!(Path::new(program).file_name().unwrap(), "leasehold");
    let mut command = Command::new("leasehold");
    command.args(words).args(["sh", "-c", "echo sweeps >> log; [ $(wc -l < log) -lt 2 ] || exec sleep 60"]);
    scene.set(&mut command);
    let mut run = Run::of(command);
    scene.says("log", "sweeps").await;
    crate::support::until("it is started again", || scene.read("log") == "sweeps\nsweeps\n").await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(143));
    assert!(scene.stage.is_free("sweeper"));

    let prevented = line("sweeper.service", "RestartPreventExitStatus=");
    let code = scene.script("leasehold run --no-such-option sweeper -- true").output().unwrap().status.code();
    assert!(prevented.split(' ').any(|it| it == code.unwrap().to_string()), "{code:?}");
}
