//! `leasehold once` and `leasehold schema`: a command that runs once per interval, as crontabs start it.

use std::process::{Command, Output, Stdio};

use leasehold::{Key, Kind};
use rustix::process::Signal;

use crate::command_children::guard;
use crate::support::command::{PROGRAM, Run, Scene, runs};
use crate::support::postgres::Cluster;
use crate::support::{Stage, quick, until};

/// A slot begins once in a year: on the day of a test with luck, and within its seconds never.
const EVERY: &str = "--every=365d";

/// Does not end when it is told to.
const STUBBORN: &str = "trap : TERM; echo $$ > $LEASEHOLD_IDENTITY; while :; do sleep 0.05; done";

impl Scene {
    /// `leasehold once OPTIONS… job -- sh -c SCRIPT`
    fn once(&self, options: &[&str], script: &str) -> Command {
        self.command_by("once", &[&[EVERY], options].concat(), script)
    }

    fn once_output(&self, options: &[&str], script: &str) -> Output {
        self.once(options, script).output().unwrap()
    }

    fn once_code(&self, options: &[&str], script: &str) -> Option<i32> {
        self.once_output(options, script).status.code()
    }
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

/// E-01, C-06, C-08: whoever comes later in a slot has nothing to do, and says nothing, unless it is asked who was quicker.
#[tokio::test]
async fn the_first_one_in_a_slot_runs_the_command() {
    on_both_stores(async |scene| {
        let output = scene.once_output(&["--identity=a"], "echo ran; echo ran >> log");
        assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"ran\n"[..]), "{output:?}");
        assert!(output.stderr.is_empty(), "cron would write a mail: {output:?}");
        for who in ["--identity=a", "--identity=b"] {
            let output = scene.once_output(&[who], "echo wrong >> log");
            assert_eq!(output.status.code(), Some(0), "{output:?}");
            assert!(
                output.stdout.is_empty() && output.stderr.is_empty(),
                "cron would write a mail: {output:?}"
            );
        }
        let output = scene.once_output(&["--identity=b", "--verbose"], "echo wrong >> log");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stderr(&output).contains("was served by a; the next one begins in"), "{output:?}");
        assert_eq!(scene.read("log"), "ran\n");
        // Another job.
        let mut other = Command::new(PROGRAM);
        other.args(["once", EVERY, "other", "--", "sh", "-c", "exit 4"]).stdin(Stdio::null());
        scene.set(&mut other);
        assert_eq!(other.status().unwrap().code(), Some(4));
    })
    .await;
}

/// E-01, D35: as crontabs do, on all hosts at once; the command is done at once.
#[tokio::test]
async fn of_many_that_start_at_once_one_runs_the_command() {
    on_both_stores(async |scene| {
        for round in 1..=3 {
            let script = format!("echo ran >> {round}");
            let one = |_| {
                let mut command = Command::new(PROGRAM);
                command.args(["once", EVERY, &format!("job {round}"), "--", "sh", "-c", &script]);
                scene.set(command.stdin(Stdio::null()));
                Run::of(command)
            };
            let mut all: Vec<Run> = (0..6).map(one).collect();
            for run in &mut all {
                assert_eq!(run.ended().await, Some(0));
            }
            assert_eq!(scene.read(&round.to_string()), "ran\n");
        }
    })
    .await;
}

/// C-02, C-05, E-06: the command's own code, with which the slot is served; and what the command is told.
#[tokio::test]
async fn the_command_knows_its_slot_and_ends_this_process_with_its_code() {
    on_both_stores(async |scene| {
        let script = "echo $LEASEHOLD_NAME $LEASEHOLD_IDENTITY $LEASEHOLD_RUN $LEASEHOLD_SLOT_AT > log; \
                      echo $LEASEHOLD_SLOT $LEASEHOLD_TOKEN > numbers; echo ${LEASEHOLD_FENCE_SQL-none} > fence; exit 5";
        assert_eq!(scene.once_code(&["--identity=a", "--offset=12h"], script), Some(5));
        assert_eq!(scene.once_code(&["--offset=12h"], "echo wrong > log"), Some(0));
        let log = scene.read("log");
        let at = log.strip_prefix("job a 1 ").unwrap().trim();
        assert!(at.ends_with("T12:00:00Z"), "{log}");
        let numbers: Vec<u64> =
            scene.read("numbers").split_whitespace().map(|it| it.parse().unwrap()).collect();
        assert!(numbers[0] > 50 && numbers[1] > 0, "{numbers:?}");
        let (fence, is_postgres) = (scene.read("fence"), scene.stage.kind() == "PostgreSQL");
        assert_eq!(fence.contains("pg_try_advisory_xact_lock_shared"), is_postgres, "{fence}");
    })
    .await;
    // One in the command of another one is told nothing of its slot.
    let scene = Scene::new(Stage::files());
    let inner = format!("{PROGRAM} lock inner -- sh -c 'echo ${{LEASEHOLD_SLOT-none}} > log'");
    assert_eq!(scene.once_code(&[], &inner), Some(0));
    assert_eq!(scene.read("log"), "none\n");
    let mut missing = Command::new(PROGRAM);
    missing.args(["once", EVERY, "missing", "--", "./not-there"]).stdin(Stdio::null());
    scene.set(&mut missing);
    assert_eq!(missing.output().unwrap().status.code(), Some(127));
}

/// E-03, C-04, D37, D38: this process is killed with -9: its command is dead soon after, and the slot is not served again, or
/// once, where that is asked for.
#[tokio::test]
async fn the_slot_of_a_killed_process_is_repeated_on_demand_only() {
    on_both_stores(async |scene| {
        let mut a = Run::of(scene.once(&["--identity=a"], STUBBORN));
        let pid = scene.pid("a").await;
        a.signal(Signal::KILL);
        a.child.wait().unwrap();
        until("its command is dead", || !runs(pid)).await;
        let output = scene.once_output(&["-v"], "echo wrong >> log");
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stderr(&output).contains("was begun by a"), "{output:?}");
        let again = "echo $LEASEHOLD_RUN >> log; exit 7";
        assert_eq!(scene.once_code(&["--retry-crashed"], again), Some(7));
        assert_eq!(scene.once_code(&["--retry-crashed"], again), Some(0));
        assert_eq!(scene.read("log"), "2\n");
    })
    .await;
}

/// C-02, C-03, D37, L-11: the session is ended by the server, or the lock taken away: none of the command's group is alive when
/// this process ends, with the code for it; and the slot has not been served to its end.
#[tokio::test]
async fn a_loss_ends_the_command() {
    let script = "trap 'exit 0' TERM; sh -c 'sh -c \"trap : TERM; echo \\$\\$ > inner; while :; do sleep 0.05; done\" & wait' & wait";
    on_both_stores(async |scene| {
        let mut run = Run::of(scene.once(&["--identity=a"], script));
        let inner = scene.pid("inner").await;
        if let Stage::Postgres(postgres) = &scene.stage {
            let admin = postgres.database.admin();
            admin.terminate(admin.backends("leasehold/a")[0]);
        } else {
            scene.stage.take_key_away("a", Key::of(Kind::Lock, "job"));
        }
        assert_eq!(run.ended().await, Some(76));
        assert!(!runs(inner), "a part of the command outlives the lock");
        assert_eq!(scene.once_code(&["--retry-crashed"], "exit $LEASEHOLD_RUN"), Some(2));
    })
    .await;
}

/// C-06, C-02: somebody holds the lock, and may be dead: that is waited for, and a signal ends the waiting; whoever holds it on
/// keeps the command from running.
#[tokio::test]
async fn whoever_holds_the_lock_keeps_the_command_from_running() {
    on_both_stores(async |scene| {
        let holder = scene.stage.locker(quick("holder"));
        let held = holder.lock("job").lock().await.unwrap();
        let mut waits = Run::of(scene.once(&[], "echo wrong >> log"));
        until("it has a guard", || guard(waits.pid()).is_some()).await;
        waits.signal(Signal::TERM);
        assert_eq!(waits.ended().await, Some(143));
        let output =
            tokio::process::Command::from(scene.once(&["-v"], "echo wrong >> log")).output().await.unwrap();
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        assert!(stderr(&output).contains("somebody has the lock"), "{output:?}");
        held.release().await.unwrap();
        holder.close().await;
        assert_eq!(scene.once_code(&[], "exit 4"), Some(4));
        assert_eq!(scene.read("log"), "");
    })
    .await;
}

/// C-06, E-06: told what is wrong, before anything is asked.
#[tokio::test]
async fn what_makes_no_sense_is_refused_with_what_would() {
    let scene = Scene::new(Stage::files());
    let run = |arguments: &[&str]| {
        let mut command = Command::new(PROGRAM);
        command.arg("once").args(arguments).stdin(Stdio::null());
        scene.set(&mut command);
        command.output().unwrap()
    };
    let write = ["--", "sh", "-c", "echo wrong >> log"];
    for (arguments, text) in [
        (["job"].as_slice(), "--every"),
        (&["--every=999ms", "job"], "at least 1s"),
        (&["--every=400d", "job"], "at most"),
        (&["--every=1h", "--offset=1h", "job"], "the offset must be shorter"),
        (&["--every=soon", "job"], "--every"),
        (&["--every=1h", "--takeover-delay=5", "job"], "takeover_delay"),
        (&["--every=1h", ""], "must not be empty"),
        (&["--every=1h"], "<NAME>"),
    ] {
        let output = run(&[arguments, &write].concat());
        assert_eq!(output.status.code(), Some(2), "{output:?}");
        assert!(stderr(&output).contains(text), "{output:?}");
    }
    let output = run(&["--every=1h", "job", "true"]);
    assert!(output.status.code() == Some(2) && stderr(&output).contains("put `--` before"), "{output:?}");
    assert_eq!(scene.read("log"), "");
    let help = String::from_utf8(run(&["--help"]).stdout).unwrap();
    assert!(help.contains("leasehold once --every 1h --offset 30m"), "{help}");

    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("postgres://app:hunter2@127.0.0.1:{closed}/app");
    let output = scene.once_output(&["--store", &url], "echo wrong >> log");
    assert_eq!(output.status.code(), Some(69), "{output:?}");
    assert!(!stderr(&output).contains("hunter2"), "{output:?}");
}

/// E-07: a role that may not make the table gets the SQL, which `schema` prints for whoever may; for a role of any name.
#[tokio::test]
async fn schema_prints_what_a_role_lacks() {
    let cluster = Cluster::new();
    cluster.admin().sql("CREATE ROLE \"od\"\"d\" LOGIN");
    let scene = Scene::new(Stage::files());
    let url = cluster.url("od%22d", "", "postgres");
    let options = ["--store", url.as_str()];
    let output = scene.once_output(&options, "echo wrong >> log");
    assert_eq!(output.status.code(), Some(78), "{output:?}");
    assert!(stderr(&output).contains("CREATE TABLE IF NOT EXISTS leasehold.slots"), "{output:?}");
    let schema = Command::new(PROGRAM).args(["schema", "--role=od\"d"]).output().unwrap();
    assert!(schema.status.success() && schema.stderr.is_empty(), "{schema:?}");
    cluster.admin().sql(&String::from_utf8(schema.stdout).unwrap());
    assert_eq!(scene.once_code(&options, "exit 4"), Some(4));
    assert_eq!(scene.once_code(&options, "exit 4"), Some(0));
    // Without a role: the table alone.
    let schema = Command::new(PROGRAM).arg("schema").output().unwrap();
    let schema = String::from_utf8(schema.stdout).unwrap();
    assert!(schema.starts_with("CREATE SCHEMA") && !schema.contains("GRANT"), "{schema}");
    cluster.admin().sql(&schema);
    assert_eq!(scene.read("log"), "");
}
