//! `leasehold status` and `leasehold step-down`, with replicas that are processes, on the stores that processes share.

use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use leasehold::{Key, Kind, Options};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::support::replica::{Lines, Replica};
use crate::support::{Stage, eventually, quick, sleepy, until};

fn stages() -> [Stage; 2] {
    [Stage::files(), Stage::postgres()]
}

/// The command, with nothing of the environment that it reads.
fn command(stage: &Stage, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold"));
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("LEASEHOLD_")) {
            command.env_remove(name);
        }
    }
    command.env("LEASEHOLD_STORE", stage.url()).args(arguments).stdin(Stdio::null());
    command
}

fn run(stage: &Stage, arguments: &[&str]) -> Output {
    command(stage, arguments).output().expect("the command runs")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// What it printed; it must succeed, and say nothing else.
#[track_caller]
fn printed(stage: &Stage, arguments: &[&str]) -> String {
    let output = run(stage, arguments);
    assert!(output.status.success() && output.stderr.is_empty(), "{arguments:?}: {output:?}");
    text(&output.stdout)
}

#[track_caller]
fn json(stage: &Stage, arguments: &[&str]) -> Value {
    serde_json::from_str(&printed(stage, arguments)).unwrap()
}

/// The exit code, and what it said on the standard error.
fn failed(stage: &Stage, arguments: &[&str]) -> (i32, String) {
    let output = run(stage, arguments);
    (output.status.code().unwrap(), text(&output.stderr))
}

async fn end(replicas: &mut [&mut Replica]) {
    for replica in replicas {
        replica.terminate();
        assert!(replica.wait().await.success());
    }
}

/// A leader `a` and a standby `b` of `job`.
async fn two_replicas(stage: &Stage, lines: &Lines, leader: &str) -> (Replica, Replica) {
    let a = Replica::spawn(stage, &sleepy("a"), "job", lines, leader);
    lines.wait_for("a tick", 0).await;
    let b = Replica::spawn(stage, &quick("b"), "job", lines, "hold");
    let stands_by = || json(stage, &["status", "--json", "job"])["elections"][0]["standbys"].clone();
    eventually("b stands by", stands_by, |standbys| standbys[0]["identity"] == "b").await;
    (a, b)
}

/// C-06: as a table, as JSON, with names that nobody leads.
#[tokio::test]
async fn status_shows_who_leads_and_how_many_stand_by() {
    for stage in stages() {
        let nothing = printed(&stage, &["status"]);
        assert!(
            nothing.starts_with("nobody leads, and nobody stands by, on ") && !nothing.contains('@'),
            "{nothing}"
        );
        let lines = Lines::new();
        let (mut a, mut b) = two_replicas(&stage, &lines, "hold").await;

        let table = printed(&stage, &["status"]);
        let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[0], ["NAME", "STATE", "LEADER", "SINCE", "FROM", "TERM", "STANDBYS"], "{table}");
        assert_eq!((rows.len(), &rows[1][..3]), (2, &["job", "leading", "a"][..]), "{table}");
        assert_eq!(rows[1][rows[1].len() - 2..], ["1", "1"], "{table}");
        assert!(!table.contains('\x1b'), "no colours but on a terminal");

        let found = json(&stage, &["status", "--json"]);
        let election = &found["elections"][0];
        assert_eq!((&election["name"], &election["state"]), (&Value::from("job"), &Value::from("leading")));
        assert_eq!(election["key"], Key::of(Kind::Lease, "job").get().to_string());
        let leader = &election["leader"];
        assert_eq!((&leader["identity"], &leader["term"]), (&Value::from("a"), &Value::from(1)));
        assert!(leader["since"].as_str().unwrap().ends_with('Z') && leader["held_for_ms"].is_u64());
        assert_eq!(found["silent"], Value::Array(Vec::new()));

        let output = run(&stage, &["status", "job", "nobody's"]);
        assert_eq!(output.status.code(), Some(67), "one of them has no leader: {output:?}");
        let table = text(&output.stdout);
        let rows: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(rows[2], ["nobody's", "nobody", "-", "-", "-", "-", "0"], "{table}");
        end(&mut [&mut a, &mut b]).await;
    }
}

/// C-06: what is shown of names of all sorts is one line each, and JSON has them as they are.
#[tokio::test]
async fn status_shows_names_of_all_sorts() {
    let long = "\u{e9}".repeat(512);
    let names = ["two words", "a 'quote' and \"another\"", "line\nend", "sp\u{e4}t", "\x1b[31mred", &long];
    for stage in stages() {
        let lines = Lines::new();
        let spawn = |(n, name): (usize, &&str)| {
            Replica::spawn(&stage, &quick(&format!("r{n}")), name, &lines, "hold")
        };
        let mut replicas: Vec<_> = names.iter().enumerate().map(spawn).collect();
        for n in 0..names.len() {
            lines.wait_for(&format!("r{n} tick"), 0).await;
        }
        let found = json(&stage, &["status", "--json"]);
        let mut shown: Vec<_> = found["elections"].as_array().unwrap().iter().collect();
        shown.sort_by_key(|it| it["leader"]["identity"].as_str());
        let shown: Vec<_> = shown.iter().map(|it| it["name"].as_str().unwrap()).collect();
        assert_eq!(shown, names);
        let table = printed(&stage, &["status"]);
        assert_eq!(table.lines().count(), 1 + names.len(), "{table}");
        assert!(
            table.contains(r#""line\nend""#) && table.contains(&long) && !table.contains('\x1b'),
            "{table}"
        );
        end(&mut replicas.iter_mut().collect::<Vec<_>>()).await;
    }
}

/// C-06, F-37: whoever took over is named; each way not to succeed has its code.
#[tokio::test]
async fn step_down_asks_and_says_who_took_over() {
    for stage in stages() {
        let (code, said) = failed(&stage, &["step-down", "job"]);
        assert_eq!(code, 67);
        assert!(said.contains("nobody leads job"), "{said}");
        assert_eq!(failed(&stage, &["step-down", "job", "--wait"]).0, 67);

        let lines = Lines::new();
        let (mut a, mut b) = two_replicas(&stage, &lines, "hold").await;
        let said = printed(&stage, &["step-down", "job", "--wait", "--timeout", "20s"]);
        assert!(said.starts_with("b (") || said.starts_with("b leads"), "{said}");
        assert!(said.contains(" leads, after a"), "{said}");
        // `a` asks again in an hour at the earliest, so `b` leads again.
        let said = printed(&stage, &["step-down", "job"]);
        assert!(said.starts_with("asked b"), "{said}");
        let seen = lines.wait_for("b end 1", 0).await;
        lines.wait_for("b start 2", seen).await;
        end(&mut [&mut b, &mut a]).await;
    }
}

/// C-06, F-37
#[tokio::test]
async fn step_down_says_why_nobody_takes_over() {
    for stage in stages() {
        let lines = Lines::new();
        let options = quick("a").answer_step_down(false);
        let mut firm = Replica::spawn(&stage, &options, "firm", &lines, "hold");
        lines.wait_for("a tick", 0).await;
        for arguments in [&["step-down", "firm"][..], &["step-down", "firm", "--wait"]] {
            let (code, said) = failed(&stage, arguments);
            assert_eq!(code, 77, "{said}");
            assert!(said.contains("answer_step_down=false"), "{said}");
        }
        let slow = quick("b").drain_timeout(Some(Duration::from_secs(1)));
        let mut slow = Replica::spawn(&stage, &slow, "slow", &lines, "stubborn");
        lines.wait_for("b tick", 0).await;
        let (code, said) = failed(&stage, &["step-down", "slow", "--wait", "--timeout", "300ms"]);
        assert_eq!(code, 75, "{said}");
        assert!(said.contains("nobody has taken over slow within 300ms"), "{said}");
        end(&mut [&mut firm, &mut slow]).await;
    }
}

/// C-06: a leader that stands still answers nothing, and is shown by what the store shows.
#[tokio::test]
async fn status_shows_a_leader_that_does_not_answer() {
    for stage in stages() {
        let lines = Lines::new();
        // A server that frees silent holders does so in an hour.
        let patient = Options::default().query_timeout(Duration::from_hours(1)).identity("a");
        let mut leader = Replica::spawn(&stage, &patient, "job", &lines, "hold");
        lines.wait_for("a tick", 0).await;
        leader.stop().await;
        let key = Key::of(Kind::Lease, "job").get().to_string();
        let found = json(&stage, &["status", "--json"]);
        let election = &found["elections"][0];
        assert_eq!((&election["name"], &election["state"]), (&Value::Null, &Value::from("no answer")));
        assert_eq!(
            (&election["key"], &election["leader"]["identity"]),
            (&Value::from(key.as_str()), &Value::from("a"))
        );
        let pid = election["leader"]["pid"].as_i64().unwrap();
        assert_eq!(found["silent"][0]["identity"], "a");
        let table = printed(&stage, &["status"]);
        assert!(table.contains(&format!("key:{key}")), "{table}");
        assert!(table.contains(&pid.to_string()) && table.contains("no answer from a"), "{table}");
        let named = printed(&stage, &["status", "job"]);
        assert!(named.contains("job") && named.contains("no answer"), "{named}");
        leader.cont();
        end(&mut [&mut leader]).await;
    }
}

/// A command that goes on. Dropped, it is killed.
struct Going(Child);

impl Going {
    fn start(stage: &Stage, arguments: &[&str]) -> Self {
        let mut command = command(stage, arguments);
        Self(command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the command runs"))
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.0.id().try_into().unwrap()).unwrap();
        kill_process(pid, signal).expect("the command can be sent a signal");
    }

    async fn ended(&mut self) -> (Option<i32>, String) {
        let ended = eventually("the command ends", || self.0.try_wait().unwrap(), Option::is_some).await;
        let mut said = String::new();
        std::io::Read::read_to_string(self.0.stderr.as_mut().unwrap(), &mut said).unwrap();
        (ended.unwrap().code(), said)
    }
}

impl Drop for Going {
    fn drop(&mut self) {
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// C-06: where there is no terminal, a line for each change; a signal ends it in order.
#[tokio::test]
async fn status_watches_and_tells_what_changes() {
    for stage in stages() {
        let lines = Lines::new();
        let (mut a, mut b) = two_replicas(&stage, &lines, "hold").await;
        let mut watch = Going::start(&stage, &["status", "--watch", "--interval", "50ms", "job"]);
        let mut told = BufReader::new(watch.0.stdout.take().unwrap()).lines().map(Result::unwrap);
        let first = told.next().unwrap();
        assert!(first.contains("Z job state=leading leader=a term=1"), "{first}");
        assert!(first.ends_with("standbys=1") && !first.contains('\x1b'), "{first}");
        a.kill();
        let next = told.find(|line| line.contains("leader=b")).unwrap();
        assert!(next.ends_with("standbys=0"), "{next}");
        watch.signal(Signal::TERM);
        assert_eq!(watch.ended().await, (Some(143), String::new()));
        until("it has left the store", || stage.sessions() <= 2).await;
        end(&mut [&mut b]).await;
    }
}

/// C-06: whoever stops reading ends it, and nothing panics.
#[tokio::test]
async fn a_closed_pipe_ends_status_without_a_word() {
    for stage in stages() {
        for arguments in [&["status"][..], &["status", "--json"], &["status", "--watch", "--json"]] {
            let lines = Lines::new();
            let mut leader = Replica::spawn(&stage, &quick("a"), "job", &lines, "hold");
            lines.wait_for("a tick", 0).await;
            let mut status = Going::start(&stage, arguments);
            drop(status.0.stdout.take());
            assert_eq!(status.ended().await, (Some(0), String::new()), "{arguments:?}");
            end(&mut [&mut leader]).await;
        }
    }
}

/// C-06: whoever stops reading ends it also where there is nothing more to tell: `leasehold status --watch | head -1`.
#[tokio::test]
async fn a_closed_pipe_ends_a_watch_that_has_nothing_to_tell() {
    for arguments in [
        &["status", "--watch", "--interval=50ms", "job"][..],
        &["status", "--watch", "--interval=50ms", "--json", "job"],
    ] {
        let stage = Stage::files();
        let mut watch = Going::start(&stage, arguments);
        let mut told = BufReader::new(watch.0.stdout.take().unwrap());
        told.read_line(&mut String::new()).unwrap();
        drop(told);
        assert_eq!(watch.ended().await, (Some(0), String::new()), "{arguments:?}");
    }
}

/// C-02, C-06
#[tokio::test]
async fn help_has_examples_and_what_makes_no_sense_is_refused() {
    let stage = Stage::files();
    for subcommand in ["status", "step-down"] {
        let help = printed(&stage, &[subcommand, "--help"]);
        assert!(help.contains(&format!("Examples:\n  leasehold {subcommand}")), "{help}");
        assert_eq!(failed(&stage, &[subcommand, ""]).0, 2);
        assert_eq!(failed(&stage, &[subcommand, &"x".repeat(1025)]).0, 2);
        let nowhere = ["--store", "postgres://127.0.0.1:1/x", subcommand, "job"];
        assert_eq!(failed(&stage, &nowhere).0, 69);
        let mut without = command(&stage, &[subcommand, "job"]);
        let output = without.env_remove("LEASEHOLD_STORE").output().unwrap();
        assert_eq!(output.status.code(), Some(2));
    }
    assert_eq!(failed(&stage, &["status", "--watch", "--interval", "0s"]).0, 2);
    assert_eq!(failed(&stage, &["step-down"]).0, 2);
    assert_eq!(failed(&stage, &["step-down", "job", "--timeout", "1s"]).0, 2);
}

/// C-06: whoever looks makes nothing, and is told where nobody has led yet.
#[test]
fn a_directory_that_does_not_exist_is_not_made_by_looking() {
    let dir = tempfile::tempdir().unwrap();
    let missing = dir.path().join("leases");
    let url = format!("file:{}", missing.display());
    for arguments in [&["status"][..], &["step-down", "job"]] {
        let output = Command::new(env!("CARGO_BIN_EXE_leasehold"))
            .args(["--store", &url])
            .args(arguments)
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(text(&output.stderr).contains("is the path right?"), "{output:?}");
        assert!(!missing.exists());
    }
}

/// C-06: what is forgotten most often.
#[test]
fn a_forgotten_separator_is_told() {
    for arguments in [&["run", "job", "echo", "hi"][..], &["run", "--restart", "always", "job", "--", "true"]]
    {
        let output = Command::new(env!("CARGO_BIN_EXE_leasehold")).args(arguments).output().unwrap();
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        let said = text(&output.stderr);
        assert!(said.contains("run NAME -- COMMAND") && said.contains("--restart=always"), "{said}");
    }
}
