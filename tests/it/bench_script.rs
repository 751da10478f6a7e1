//! `scripts/bench`, with a Cargo that plays the benches: what it makes of what they tell.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tempfile::TempDir;

/// Each bench is played by a function of its name, which the test writes.
const CARGO: &str = r#"#!/bin/sh
. "${0%/*}/benches"
for argument; do
    [ "$argument" = --no-run ] && exit 0
done
while [ "$1" != --bench ]; do shift; done
echo "    Finished something" >&2
"$2" || { echo "error: bench failed, to rerun pass \`--bench $2\`" >&2; exit 1; }
"#;

const GOOD: &str = r#"
good() { echo '{"metric":"a","ok":true}'; echo '{"metric":"b","ok":null}'; printf 'busy\n| what |\n|---|\n| a of %s |\n\nIt was quiet.\n' "$1" >&2; }
failover() { good failover; }
command() { good command; }
locks() { good locks; }
scale() { good scale; }
"#;

const MISSES: &str = r#"
scale() { good scale; echo '{"metric":"c","ok":false}'; echo '{"metric":"d","ok":false}'; return 1; }
"#;

/// It has told of some of its figures by then.
const FAILS: &str = r#"
command() { echo '{"metric":"a","ok":true}'; echo "no server to be found" >&2; return 1; }
"#;

struct Run {
    folder: TempDir,
    output: Output,
}

impl Run {
    fn of(benches: &[&str], arguments: &[&str]) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let cargo = folder.path().join("cargo");
        fs::write(&cargo, CARGO).unwrap();
        fs::set_permissions(&cargo, fs::Permissions::from_mode(0o755)).unwrap();
        fs::write(folder.path().join("benches"), benches.concat()).unwrap();
        let path = std::env::var("PATH").unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("scripts/bench");
        let mut command = Command::new(script);
        command.args(arguments).arg(folder.path().join("figures/report.md"));
        command.env("PATH", format!("{}:{path}", folder.path().display()));
        let output = command.output().unwrap();
        Self { folder, output }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join("figures").join(name)
    }

    fn report(&self) -> String {
        fs::read_to_string(self.file("report.md")).unwrap()
    }

    fn code(&self) -> i32 {
        self.output.status.code().unwrap()
    }

    fn told(&self) -> String {
        String::from_utf8_lossy(&self.output.stderr).into_owned()
    }
}

#[test]
fn the_report_has_the_machine_the_versions_and_the_table_of_every_bench() {
    let run = Run::of(&[GOOD], &[]);
    assert_eq!(run.code(), 0, "{}", run.told());
    let report = run.report();
    for what in ["machine", "load average", "date", "leasehold", "rustc", "PostgreSQL", "Redis"] {
        assert_eq!(report.matches(&format!("\n| {what} | ")).count(), 1, "{what}: {report}");
    }
    let sections = ["failover", "command", "locks", "scale"].map(|bench| {
        assert_eq!(fs::read_to_string(run.file(&format!("{bench}.jsonl"))).unwrap().lines().count(), 2);
        let at =
            report.find(&format!("\n## {bench}\n\n1 goals reached, **0 missed**. It took 0 min ")).unwrap();
        let table = format!("\n\n| what |\n|---|\n| a of {bench} |\n\nIt was quiet.\n");
        assert!(report[at..].contains(&table), "{report}");
        at
    });
    assert!(sections.is_sorted(), "{report}");
    assert!(!report.contains("busy") && !report.contains("Finished"), "{report}");
}

#[test]
fn goals_that_were_missed_are_counted_and_keep_no_other_bench_from_running() {
    let misses_first = MISSES.replace("scale", "failover");
    let run = Run::of(&[GOOD, MISSES, &misses_first], &["--quick"]);
    assert_eq!(run.code(), 4, "{}", run.told());
    assert!(run.told().ends_with("report.md: 4 goals missed\n"), "{}", run.told());
    let report = run.report();
    assert_eq!(report.matches("\n\n1 goals reached, **2 missed**.").count(), 2, "{report}");
    assert_eq!(report.matches("\n\n1 goals reached, **0 missed**.").count(), 2, "{report}");
    assert!(!report.contains("error: "), "{report}");
    assert_eq!(report.matches(" -- --quick`").count(), 4, "{report}");
}

#[test]
fn a_bench_that_fails_is_told_of_and_its_former_lines_stay() {
    let run = Run::of(&[GOOD, FAILS, MISSES], &[]);
    assert_eq!(run.code(), 101, "{}", run.told());
    assert!(run.told().ends_with("report.md: 2 goals missed; failed: command\n"), "{}", run.told());
    let report = run.report();
    assert!(report.contains("## command\n\n**It failed**, after "), "{report}");
    assert!(report.contains("\nno server to be found\n"), "{report}");
    assert!(!run.file("command.jsonl").exists());
    assert!(run.file("scale.jsonl").exists());
}

#[test]
fn benches_are_chosen_by_name_and_others_are_refused() {
    let run = Run::of(&[GOOD], &["--only", "locks", "--only", "scale"]);
    assert_eq!(run.code(), 0, "{}", run.told());
    let report = run.report();
    assert!(report.contains("\n## locks\n") && report.contains("\n## scale\n"), "{report}");
    assert!(!report.contains("\n## failover\n") && !report.contains("\n## command\n"), "{report}");
    for wrong in [&["--only", "lock"][..], &["--only"], &["--quickly"], &["elsewhere.md"]] {
        let run = Run::of(&[GOOD], wrong);
        assert_eq!(run.code(), 102, "{wrong:?}: {}", run.told());
        assert!(!run.file("report.md").exists(), "{wrong:?}");
    }
}
