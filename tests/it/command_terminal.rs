//! `leasehold run` on a terminal: typed signals, reading, job control, hanging up.

use rustix::process::{Pid, Signal, kill_process};

use crate::support::command::{Scene, runs, state};
use crate::support::terminal::{CTRL_BACKSLASH, CTRL_C, CTRL_Z, Shell, Terminal};
use crate::support::{Stage, eventually, until};

/// Counts a signal, and ends with 7 when it has had time to come a second time.
fn counts(signal: &str) -> String {
    format!(
        "ulimit -c 0; n=0; trap 'echo {signal} >> log; n=1' {signal}; echo ready >> log; \
         while [ $n -lt 10 ]; do sleep 0.02; [ $n -eq 0 ] || n=$((n+1)); done; exit 7"
    )
}

/// Goes on until it is told to end.
const GOES_ON: &str = "echo $PPID > wrapper; echo $$ > pid; while :; do echo tick >> ticks; sleep 0.02; done";

impl Scene {
    /// A script that a shell finds as `sh job`.
    fn job(script: &str) -> Self {
        let scene = Self::new(Stage::files());
        std::fs::write(scene.path("job"), script).unwrap();
        scene
    }

    /// Waits until the command goes on.
    async fn ticks(&self) {
        let before = self.read("ticks").len();
        until("it goes on", || self.read("ticks").len() > before).await;
    }
}

/// Waits until a process stands still.
async fn stands_still(pid: Pid) {
    eventually("it stands still", || state(pid), |state| *state == Some('T')).await;
}

/// C-08, C-04: what is typed to interrupt is one signal for the command, also where two of these processes are nested or
/// shells are in between; and the command's code is that of all.
#[tokio::test]
async fn what_is_typed_is_one_signal_for_the_command() {
    for (typed, signal) in [(CTRL_C, "INT"), (CTRL_BACKSLASH, "QUIT")] {
        for command in [
            &["sh", "job"][..],
            &["leasehold", "run", "inner", "--", "sh", "job"],
            &["sh", "-c", "sh job; exit $?"],
        ] {
            // A shell in between is not to die of it.
            let command: Vec<_> = command
                .iter()
                .map(|it| it.replace("sh job;", &format!("trap : {signal}; sh job;")))
                .collect();
            let command: Vec<_> = command.iter().map(String::as_str).collect();
            let scene = Scene::job(&counts(signal));
            let terminal = Terminal::new();
            let mut run = terminal.start(&scene.command_of(&command));
            scene.says("log", "ready").await;
            terminal.type_in(typed);
            assert_eq!(run.ended().await, Some(7), "{command:?}: {}", terminal.shown());
            assert_eq!(scene.read("log"), format!("ready\n{signal}\n"), "{command:?}");
            assert!(scene.stage.is_free("job"));
        }
    }
}

/// C-08: the command has the terminal whatever else the standard streams are, and one signal is one there, too; whoever is
/// beside it in a pipeline can read the terminal while it runs.
#[tokio::test]
async fn redirected_streams_do_not_matter() {
    for line in [
        "leasehold run --stop-grace=1m job -- sh job < /dev/null",
        "leasehold run --stop-grace=1m job -- sh job > out",
        "leasehold run --stop-grace=1m job -- sh job | cat > out; (exit ${PIPESTATUS[0]})",
    ] {
        let scene = Scene::job(&counts("INT"));
        let shell = Shell::start(&scene);
        shell.line(line);
        shell.says("log", "ready").await;
        shell.type_in(CTRL_C);
        shell.says("log", "INT").await;
        let code = shell.answers().await;
        // The shell does not go on with a list whose pipeline was interrupted.
        assert!(code == 7 || code == 130 && line.contains('|'), "{line}: {code}");
        assert_eq!(scene.read("log"), "ready\nINT\n", "{line}");

        std::fs::write(scene.path("job"), "read line < /dev/tty; echo \"$line\" >> log; exit 3").unwrap();
        shell.line(&line.replace("sh job", "sh -c 'echo reads >> log; exec sh job'"));
        shell.says("log", "reads").await;
        shell.line("hello");
        shell.says("log", "hello").await;
        assert_eq!(shell.answers().await, 3, "{line}");
    }
    let scene = Scene::job(GOES_ON);
    let shell = Shell::start(&scene);
    shell.line("leasehold run job -- sh job | sh -c 'read line < /dev/tty; echo \"$line\" >> log; cat'");
    scene.pid("pid").await;
    shell.line("hello");
    shell.says("log", "hello").await;
    shell.type_in(CTRL_C);
    shell.answers().await;
}

/// C-08: it reads what is typed, and afterwards the shell does; however the command ended, and also where the process that
/// had lent it the terminal was killed.
#[tokio::test]
async fn the_terminal_is_the_shells_again() {
    let scene = Scene::job("read line; echo \"$line\" >> log; read end; eval \"$end\"");
    let shell = Shell::start(&scene);
    for (n, (end, code)) in
        [("exit 0", 0), ("exit 3", 3), ("kill -9 $$", 137), ("kill -9 $PPID; sleep 60", 137)]
            .iter()
            .enumerate()
    {
        shell.line("leasehold run job -- sh job");
        shell.line(&format!("line {n}"));
        shell.says("log", &format!("line {n}")).await;
        shell.line(end);
        assert_eq!(shell.answers().await, *code, "{end}");
        scene.stage.until_free("job").await;
    }
}

/// C-08: a shell without job control takes nothing back by itself: the guard gives it the terminal where the process that
/// had lent it was killed.
#[tokio::test]
async fn the_guard_gives_the_terminal_back() {
    let scene = Scene::job(GOES_ON);
    let terminal = Terminal::new();
    let script = "leasehold run job -- sh job; until read line; do sleep 0.02; done; echo \"$line\" >> log";
    let mut run = terminal.start(&scene.script(script));
    scene.ticks().await;
    kill_process(scene.pid("wrapper").await, Signal::KILL).unwrap();
    terminal.type_in("hello\n");
    assert_eq!(run.ended().await, Some(0), "{}", terminal.shown());
    assert_eq!(scene.read("log"), "hello\n");
    assert!(!runs(scene.pid("pid").await));
}

/// C-08: a leader is not suspended, with the terminal and without: its command goes on, and can still be interrupted.
#[tokio::test]
async fn a_leader_is_not_suspended() {
    for line in ["leasehold run job -- sh job", "leasehold run job -- sh job < /dev/null"] {
        let scene = Scene::job(&format!("trap 'echo goes on >> log' CONT; {GOES_ON}"));
        let shell = Shell::start(&scene);
        shell.line(line);
        scene.ticks().await;
        // Often, since its shell may be anywhere, such as in vfork(2).
        for n in 0..20 {
            shell.type_in(CTRL_Z);
            if !line.contains('<') {
                // It did stand still.
                until("it goes on", || scene.read("log").lines().count() > n).await;
            }
            scene.ticks().await;
        }
        shell.type_in(CTRL_C);
        assert_eq!(shell.answers().await, 130, "{line}");
        assert!(scene.stage.is_free("job"));
    }
}

/// C-08: interrupted by what is typed, it is not started again: whoever types that means all of it.
#[tokio::test]
async fn what_is_typed_ends_also_what_would_be_started_again() {
    let scene = Scene::job(GOES_ON);
    let shell = Shell::start(&scene);
    shell.line("leasehold run --restart=always job -- sh job");
    scene.ticks().await;
    shell.type_in(CTRL_C);
    assert_eq!(shell.answers().await, 130);
    assert!(scene.stage.is_free("job"));
}

/// C-08, C-04, D38: the terminal goes away: command, wrapper and shell end, and the lease is free.
#[tokio::test]
async fn a_terminal_that_hangs_up_ends_all() {
    let scene = Scene::job(&format!("trap 'echo HUP >> log; exit 0' HUP; {GOES_ON}"));
    let mut shell = Shell::start(&scene);
    shell.line("leasehold --quiet run job -- sh job");
    scene.ticks().await;
    shell.hang_up();
    shell.ended().await;
    scene.says("log", "HUP").await;
    let (wrapper, pid) = (scene.pid("wrapper").await, scene.pid("pid").await);
    until("all have ended", || !runs(wrapper) && !runs(pid)).await;
    assert!(scene.stage.is_free("job"));

    let scene = Scene::job(GOES_ON);
    let terminal = Terminal::new();
    let mut run = terminal.start(&scene.command(&[], "exec sh job"));
    scene.ticks().await;
    drop(terminal);
    assert_eq!(run.ended().await, Some(129));
    assert!(!runs(scene.pid("pid").await) && scene.stage.is_free("job"));
}

/// C-08: started in the background, the command runs; it stands still when it reads the terminal, or writes to one on
/// which those in the background may not; and goes on when it is put in front.
#[tokio::test]
async fn started_in_the_background_it_waits_for_the_terminal() {
    for (set_up, script) in [
        (":", "echo $$ > pid; read line; echo \"$line\" >> log; exit 5"),
        ("stty tostop", "echo $$ > pid; echo out; read line; echo \"$line\" >> log; exit 5"),
    ] {
        let scene = Scene::job(script);
        let shell = Shell::start(&scene);
        shell.line(set_up);
        shell.line("leasehold run job -- sh job &");
        stands_still(scene.pid("pid").await).await;
        assert_eq!(shell.answers().await, 0);
        shell.line("fg");
        shell.line("hello");
        shell.says("log", "hello").await;
        assert_eq!(shell.answers().await, 5, "{set_up}");
        assert!(scene.stage.is_free("job"));
    }
}

/// C-03, D40: it stands still since it wants the terminal, and is told to stop.
#[tokio::test]
async fn a_command_that_waits_for_the_terminal_can_be_ended() {
    let scene = Scene::job("echo $PPID > wrapper; echo $$ > pid; read line");
    let shell = Shell::start(&scene);
    shell.line("leasehold run job -- sh job &");
    let (wrapper, pid) = (scene.pid("wrapper").await, scene.pid("pid").await);
    stands_still(pid).await;
    kill_process(wrapper, Signal::TERM).unwrap();
    until("both have ended", || !runs(wrapper) && !runs(pid)).await;
    assert!(scene.stage.is_free("job"));
    shell.line("wait $!");
    assert_eq!(shell.answers().await, 143);
}

/// C-08: what this process logs does not stop it, where those in the background may not write to the terminal: while the
/// command is in front, that is this process.
#[tokio::test]
async fn its_log_does_not_stop_it() {
    let scene = Scene::job("echo run >> log; test $(wc -l < log) -ge 2");
    let shell = Shell::start(&scene);
    shell.line("stty tostop");
    shell.line("leasehold -v run --restart job -- sh job");
    assert_eq!(shell.answers().await, 0);
    assert_eq!(scene.read("log"), "run\nrun\n");
}

/// C-08: somebody has stopped this process, so the shell has taken the terminal: it keeps that when the command ends; and
/// the command has it when this process is put in front again.
#[tokio::test]
async fn a_stopped_process_does_not_take_the_terminal_from_the_shell() {
    let scene = Scene::job(&format!("(read line; echo \"$line\" >> log) & {GOES_ON}"));
    let shell = Shell::start(&scene);
    shell.line("leasehold run job -- sh -c 'read line; echo \"$line\" >> log; exec sh job < /dev/null'");
    shell.line("first");
    shell.says("log", "first").await;
    scene.ticks().await;
    let wrapper = scene.pid("wrapper").await;
    kill_process(wrapper, Signal::STOP).unwrap();
    shell.answers().await;
    shell.line("fg");
    // As soon as it has the terminal, that interrupts the command; before, this process, which passes it on.
    eventually("it goes on", || state(wrapper), |state| *state == Some('S')).await;
    shell.type_in(CTRL_C);
    assert_eq!(shell.answers().await, 130);
    assert!(scene.stage.is_free("job"));

    shell.line("leasehold run job -- sh job");
    scene.ticks().await;
    let wrapper = eventually(
        "it has started",
        || scene.read("wrapper"),
        |it| it.trim() != wrapper.as_raw_pid().to_string(),
    )
    .await;
    let wrapper = Pid::from_raw(wrapper.trim().parse().unwrap()).unwrap();
    kill_process(wrapper, Signal::STOP).unwrap();
    shell.answers().await;
    kill_process(wrapper, Signal::CONT).unwrap();
    kill_process(wrapper, Signal::TERM).unwrap();
    until("it has ended", || !runs(wrapper)).await;
    shell.answers().await;
    assert!(scene.stage.is_free("job"));
}
