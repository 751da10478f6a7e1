//! `leasehold run`, as a person or a script uses it.

use std::fs;
use std::process::Command;

use rustix::process::Signal;

use crate::support::command::{PROGRAM, Scene, runs};
use crate::support::{Stage, eventually, now, until};

/// C-02, D39: the command's own code, that of a signal, and those of a command that cannot be executed; the lease is
/// free again after each.
#[tokio::test]
async fn the_exit_code_is_that_of_the_command() {
    for stage in [Stage::files(), Stage::postgres()] {
        let scene = Scene::new(stage);
        let options = ["--takeover-delay=0s"];
        for (script, code) in
            [("exit 0", 0), ("exit 1", 1), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", 137)]
        {
            assert_eq!(scene.code(&options, script), Some(code), "{script}");
            assert!(scene.stage.is_free("job"));
        }
        for (program, code) in [("/nowhere/to/be-found", 127), ("/etc/passwd", 126)] {
            let mut command = Command::new(PROGRAM);
            command.args(["run", "--takeover-delay=0s", "--store", &scene.stage.url(), "job", "--", program]);
            let output = command.output().unwrap();
            assert_eq!(output.status.code(), Some(code), "{output:?}");
            assert!(String::from_utf8_lossy(&output.stderr).contains(program), "{output:?}");
            assert!(scene.stage.is_free("job"));
        }
    }
}

/// C-02: bad usage, a store that cannot be reached, a name that somebody else leads; each has a code of its own, and the
/// command is not started.
#[tokio::test]
async fn what_goes_wrong_has_a_code_of_its_own() {
    let scene = Scene::new(Stage::files());
    let mut leader = scene.start(&[], "echo leads >> log; exec sleep 60");
    scene.says("log", "leads").await;
    assert_eq!(scene.code(&["--no-wait"], "echo wrong >> log"), Some(75));
    assert_eq!(scene.code(&["--wait=200ms"], "echo wrong >> log"), Some(75));
    assert_eq!(scene.code(&["--stop-grace=soon"], "echo wrong >> log"), Some(2));
    leader.signal(Signal::TERM);
    assert_eq!(leader.ended().await, Some(143));
    let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("postgres://app:hunter2@127.0.0.1:{closed}/app");
    for wait in ["--no-wait", "--wait=300ms"] {
        let output = Command::new(PROGRAM)
            .args([
                "run",
                "--store",
                &url,
                "--query-timeout=1s",
                "--retry-interval=100ms",
                wait,
                "job",
                "--",
                "true",
            ])
            .output()
            .unwrap();
        assert_eq!(output.status.code(), Some(69), "{output:?}");
        assert!(!String::from_utf8_lossy(&output.stderr).contains("hunter2"), "{output:?}");
    }
    let output = Command::new(PROGRAM)
        .args(["run", "job", "--", "true"])
        .env_remove("LEASEHOLD_STORE")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(2), "{output:?}");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(text.contains("postgres://") && text.contains("file:"), "{text}");
    assert_eq!(scene.read("log"), "leads\n");
}

/// C-01: one at a time; the standby's command starts when the leader's has ended.
#[tokio::test]
async fn the_command_runs_only_while_this_process_leads() {
    for stage in [Stage::files(), Stage::postgres()] {
        let scene = Scene::new(stage);
        let script = "echo $LEASEHOLD_NAME $LEASEHOLD_IDENTITY start >> log; trap 'echo end >> log; exit 0' TERM; \
                      while :; do sleep 0.05; done";
        let mut a = scene.start(&["--identity=a"], script);
        scene.says("log", "job a start").await;
        let mut b = scene.start(&["--identity=b"], script);
        a.signal(Signal::TERM);
        assert_eq!(a.ended().await, Some(0));
        scene.says("log", "job b start").await;
        assert_eq!(scene.read("log"), "job a start\nend\njob b start\n");
        b.signal(Signal::INT);
        // It did not trap that.
        assert_eq!(b.ended().await, Some(130));
        assert!(scene.stage.is_free("job"));
    }
}

/// C-05: the token is that of the term, also for a command that is started again in it, and greater in the next one.
#[tokio::test]
async fn the_command_knows_for_whom_it_runs() {
    for stage in [Stage::files(), Stage::postgres()] {
        let scene = Scene::new(stage);
        let script = "echo $LEASEHOLD_NAME $LEASEHOLD_IDENTITY $LEASEHOLD_TERM $LEASEHOLD_TOKEN >> log; \
                      echo ${LEASEHOLD_FENCE_SQL-none} > fence; test $(wc -l < log) -ge 2";
        for who in ["a", "b"] {
            let options = ["--restart", "--takeover-delay=0s", "--identity", who];
            assert_eq!(scene.code(&options, script), Some(0));
        }
        let (fence, is_postgres) = (scene.read("fence"), scene.stage.kind() == "PostgreSQL");
        assert_eq!(fence.contains("pg_try_advisory_xact_lock_shared"), is_postgres, "{fence}");
        assert_eq!(fence == "none\n", !is_postgres, "{fence}");
        let log = scene.read("log");
        let lines: Vec<(&str, i64)> = log
            .lines()
            .map(|line| line.rsplit_once(' ').unwrap())
            .map(|(rest, token)| (rest, token.parse().unwrap()))
            .collect();
        let [(first, one), (again, same), (next, two)] = lines[..] else { panic!("{log}") };
        assert_eq!((first, again, next), ("job a 1", "job a 1", "job b 1"));
        assert!(one == same && two > one, "{log}");
    }
}

/// C-05: another `run` in the command is another process, and is called so.
#[tokio::test]
async fn a_run_inside_of_a_run_has_a_name_of_its_own() {
    let scene = Scene::new(Stage::files());
    let inner = format!(
        "{PROGRAM} run --store {} inner -- sh -c 'echo $LEASEHOLD_NAME $LEASEHOLD_IDENTITY > log'",
        scene.stage.url()
    );
    assert_eq!(scene.code(&["--identity=outer"], &inner), Some(0));
    let log = scene.read("log");
    assert!(log.starts_with("inner ") && !log.contains("outer"), "{log}");
    let mut named = scene.command(&[], "echo $LEASEHOLD_IDENTITY > named");
    assert!(named.env("LEASEHOLD_IDENTITY", "by-variable").status().unwrap().success());
    assert_eq!(scene.read("named"), "by-variable\n");
}

/// C-01, F-37: a process that leads once does not stand by again when it has handed over.
#[tokio::test]
async fn a_process_that_leads_once_ends_when_it_hands_over() {
    let scene = Scene::new(Stage::files());
    let mut run =
        scene.start(&["--once"], "trap 'exit 5' TERM; echo ready > log; while :; do sleep 0.05; done");
    scene.says("log", "ready").await;
    let asked =
        Command::new(PROGRAM).args(["--store", &scene.stage.url(), "step-down", "job"]).output().unwrap();
    assert!(asked.status.success(), "{asked:?}");
    assert_eq!(run.ended().await, Some(5));
    assert!(scene.stage.is_free("job"));
}

/// C-05: no token, no command.
#[tokio::test]
async fn a_command_is_not_started_without_its_token() {
    let scene = Scene::new(Stage::files());
    fs::create_dir(scene.stage.lock_file("job").with_extension("token")).unwrap();
    assert_eq!(scene.code(&[], "echo wrong > log"), Some(69));
    assert_eq!(scene.read("log"), "");
    assert!(scene.stage.is_free("job"));
}

/// C-03, D37: the lease is lost while three nested shells run: none of them is alive when the next command starts, in
/// the same process.
#[tokio::test]
async fn the_whole_group_is_ended_when_the_lease_is_lost() {
    let scene = Scene::new(Stage::postgres());
    let Stage::Postgres(postgres) = &scene.stage else { unreachable!("it was made so") };
    // The innermost ignores what it is told.
    let script = "echo start >> log; sh -c 'sh -c \"echo \\$\\$ > inner; trap : TERM; while :; do sleep 0.05; done\" & wait' & wait";
    let mut run = scene.start(&["--identity=a", "--takeover-delay=0s"], script);
    let inner = scene.pid("inner").await;
    let key = leasehold::Key::of(leasehold::Kind::Lease, "job").get();
    postgres.database.admin().terminate(postgres.database.admin().holder(key).unwrap());
    eventually("it starts again", || scene.read("log"), |log| log.lines().count() == 2).await;
    assert!(!runs(inner), "the first command lives beside the second");
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(143));
    until("nothing is left", || scene.stage.is_free("job")).await;
}

/// C-03, D40: a command that ignores TERM is killed when its grace is over; one that stands still, too; and a second
/// signal does not wait for that.
#[tokio::test]
async fn a_command_that_does_not_end_is_killed() {
    let scene = Scene::new(Stage::files());
    let mut run = scene.start(&[], "trap : TERM; echo $$ > pid; while :; do sleep 0.05; done");
    let pid = scene.pid("pid").await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(137));
    assert!(!runs(pid) && scene.stage.is_free("job"));

    let mut run =
        scene.start(&[], "trap : TERM; echo $$ > stopped; kill -STOP $$; while :; do sleep 0.05; done");
    let pid = scene.pid("stopped").await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(137));
    assert!(!runs(pid));

    let mut run =
        scene.start(&["--stop-grace=1h"], "trap : TERM INT; echo $$ > patient; while :; do sleep 0.05; done");
    let pid = scene.pid("patient").await;
    run.signal(Signal::TERM);
    run.signal(Signal::INT);
    assert_eq!(run.ended().await, Some(137));
    assert!(!runs(pid));
}

/// C-04, D38: each is passed on to the command, and ends this process unless it is for the command alone.
#[tokio::test]
async fn signals_are_passed_on() {
    let scene = Scene::new(Stage::files());
    for (signal, name) in
        [(Signal::TERM, "TERM"), (Signal::INT, "INT"), (Signal::HUP, "HUP"), (Signal::QUIT, "QUIT")]
    {
        let script = format!(
            "trap 'echo got-{name} >> log; exit 7' {name}; echo ready-{name} >> log; while :; do sleep 0.05; done"
        );
        let mut run = scene.start(&[], &script);
        scene.says("log", &format!("ready-{name}")).await;
        run.signal(signal);
        assert_eq!(run.ended().await, Some(7), "{name}");
        scene.says("log", &format!("got-{name}")).await;
        assert!(scene.stage.is_free("job"));
    }
    let script = "trap 'echo one >> log' USR1; trap 'echo two >> log' USR2; echo ready >> log; while :; do sleep 0.05; done";
    let mut run = scene.start(&[], script);
    scene.says("log", "ready").await;
    run.signal(Signal::USR1);
    scene.says("log", "one").await;
    run.signal(Signal::USR2);
    scene.says("log", "two").await;
    run.signal(Signal::TERM);
    assert_eq!(run.ended().await, Some(143));
}

/// C-04, D38: this process is killed with -9: its command is dead before another one's begins.
#[tokio::test]
async fn the_command_of_a_killed_process_dies_before_another_one_starts() {
    for stage in [Stage::files(), Stage::postgres()] {
        let scene = Scene::new(stage);
        let script =
            "trap : TERM; echo $$ > $LEASEHOLD_IDENTITY; echo start >> log; while :; do sleep 0.05; done";
        let mut a = scene.start(&["--identity=a"], script);
        let pid = scene.pid("a").await;
        let mut b = scene.start(&["--identity=b"], script);
        let since = now();
        a.signal(Signal::KILL);
        a.child.wait().unwrap();
        until("its command is dead", || !runs(pid)).await;
        println!("dead {:?} after its wrapper", since.elapsed());
        let other = scene.pid("b").await;
        assert!(runs(other) && !runs(pid));
        b.signal(Signal::TERM);
        assert_eq!(b.ended().await, Some(137));
    }
}

/// C-04, D11: this process is stopped: its guard kills the command before anybody else may lead.
#[tokio::test]
async fn the_command_of_a_process_that_stands_still_dies_before_another_one_starts() {
    let scene = Scene::new(Stage::postgres());
    let script = "trap : TERM; echo $$ > $LEASEHOLD_IDENTITY; while :; do sleep 0.05; done";
    let mut a = scene.start(&["--identity=a"], script);
    let pid = scene.pid("a").await;
    let mut b = scene.start(&["--identity=b"], script);
    a.signal(Signal::STOP);
    let other = scene.pid("b").await;
    assert!(runs(other) && !runs(pid), "two commands run");
    a.signal(Signal::CONT);
    a.signal(Signal::TERM);
    a.ended().await;
    b.signal(Signal::TERM);
    assert_eq!(b.ended().await, Some(137));
}

/// C-01: started again when it has ended, and not when it has succeeded.
#[tokio::test]
async fn a_command_is_started_again_if_so_wished() {
    let scene = Scene::new(Stage::files());
    let script = "echo run >> log; test $(wc -l < log) -ge 2";
    assert_eq!(scene.code(&["--restart"], script), Some(0));
    assert_eq!(scene.read("log"), "run\nrun\n");
}

/// C-01: a loss ends the process where it is to lead once, with a code that says so.
#[tokio::test]
async fn a_process_that_leads_once_ends_at_a_loss() {
    let scene = Scene::new(Stage::files());
    let mut run = scene.start(&["--once", "--identity=a"], "echo $$ > pid; exec sleep 60");
    let pid = scene.pid("pid").await;
    scene.stage.take_away("a", "job");
    assert_eq!(run.ended().await, Some(76));
    assert!(!runs(pid));
}

/// C-03: what the command leaves behind in its group goes before the lease does.
#[tokio::test]
async fn what_the_command_leaves_behind_is_ended_too() {
    let scene = Scene::new(Stage::files());
    assert_eq!(scene.code(&[], "sleep 60 & echo $! > daemon; exit 3"), Some(3));
    assert!(!runs(scene.pid("daemon").await) && scene.stage.is_free("job"));
}
