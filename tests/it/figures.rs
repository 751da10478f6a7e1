//! The figures that were published: see `benches/failover`, `benches/command`, `benches/locks` and `benches/scale`;
//! and the report of `scripts/bench`.

use serde_json::Value;

const LINES: &str = include_str!("../../docs/figures/failover.jsonl");
const COMMAND_LINES: &str = include_str!("../../docs/figures/command.jsonl");
const LOCK_LINES: &str = include_str!("../../docs/figures/locks.jsonl");
const SCALE_LINES: &str = include_str!("../../docs/figures/scale.jsonl");
const REPORT: &str = include_str!("../../docs/figures/report.md");
const README: &str = include_str!("../../README.md");

/// What the bench measures, in its order.
const SCENARIOS: [&str; 14] = [
    "graceful stop",
    "step down",
    "graceful stop, retry interval 1 h",
    "kill -9",
    "backend terminated",
    "server restarted",
    "replica promoted",
    "holder frozen",
    "silent partition, idle",
    "silent partition, statement in flight",
    "half a statement delivered",
    "server slow by query timeout + 1 s",
    "backend stopped 2 s, default options",
    "caller's runtime blocked",
];

fn is_spread(value: &Value) -> bool {
    let (median, max) = (value["median"].as_f64(), value["max"].as_f64());
    matches!((median, max), (Some(median), Some(max)) if 0.0 <= median && median <= max)
}

#[test]
fn every_line_of_the_figures_is_json_for_a_goal_that_was_reached() {
    let lines = lines(LINES);
    let scenarios: Vec<&str> = lines.iter().map(|line| line["scenario"].as_str().unwrap()).collect();
    assert_eq!(scenarios, SCENARIOS);
    for line in &lines {
        assert!(is_spread(&line["vacancy_ms"]) && is_spread(&line["overlap_ms"]), "{line}");
        assert!(is_spread(&line["naive_vacancy_ms"]) || line["naive_vacancy_over_ms"].is_number(), "{line}");
        assert!(line["bound_ms"].is_number() || line["changes_of_leader"] == 0, "{line}");
        assert!(line["rounds"].as_u64() >= Some(5) && line["ok"] == true, "{line}");
    }
}

#[test]
fn the_readme_has_a_row_for_every_line_of_the_figures() {
    for scenario in SCENARIOS {
        assert_eq!(README.matches(&format!("| {scenario} |")).count(), 1, "{scenario}");
    }
}

fn lines(text: &str) -> Vec<Value> {
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// Nothing is hidden: what has a goal is in the README, and a goal that was missed is called so there.
fn is_told(line: &Value) {
    let metric = line["metric"].as_str().unwrap();
    let rows: Vec<&str> = README.lines().filter(|row| row.starts_with(&format!("| {metric} |"))).collect();
    let [row] = rows[..] else { panic!("{metric}: {rows:?}") };
    assert_eq!(row.contains("missed"), line["ok"] == false, "{line} is {row}");
}

#[test]
fn the_readme_has_a_row_for_every_goal_of_the_command_line() {
    let lines = lines(COMMAND_LINES);
    let judged: Vec<&Value> = lines.iter().filter(|line| line["goal"].is_number()).collect();
    assert!(judged.len() >= 9, "{judged:?}");
    for line in judged {
        assert_eq!(line["value"].as_f64() < line["goal"].as_f64(), line["ok"] == true, "{line}");
        is_told(line);
    }
}

/// Those with a goal, of which each is called reached where it was.
fn judged(lines: &[Value]) -> Vec<&Value> {
    let judged: Vec<&Value> = lines.iter().filter(|line| line["goal"].is_number()).collect();
    for line in &judged {
        let number = |of: &str| line[of].as_f64();
        let is_reached = match line["goal_is"].as_str() {
            Some("value below") => number("value") < number("goal"),
            Some("value at most") => number("value") <= number("goal"),
            Some("ratio at most") => number("ratio") <= number("goal"),
            Some("ratio at least") => number("ratio") >= number("goal"),
            other => panic!("a goal that is {other:?}"),
        };
        assert_eq!(line["ok"].as_bool(), Some(is_reached), "{line}");
    }
    judged
}

#[test]
fn the_readme_has_a_row_for_every_goal_of_critical_sections() {
    let lines = lines(LOCK_LINES);
    let judged = judged(&lines);
    assert!(judged.len() >= 9, "{judged:?}");
    judged.into_iter().for_each(is_told);
}

/// What the report has of a bench.
fn section(bench: &str) -> Option<&'static str> {
    REPORT.split("\n## ").find_map(|section| section.strip_prefix(&format!("{bench}\n")))
}

/// The report has each figure, once, and says whether its goal was reached.
fn is_reported(line: &Value, section: &str) {
    let metric = line["metric"].as_str().unwrap();
    let rows: Vec<&str> = section.lines().filter(|row| row.starts_with(&format!("| {metric} | "))).collect();
    let [row] = rows[..] else { panic!("{metric}: {rows:?}") };
    let word = match line["ok"].as_bool() {
        Some(true) => "yes",
        Some(false) => "NO",
        None => "-",
    };
    assert!(row.ends_with(&format!("| {word} |")), "{line} is {row}");
}

#[test]
fn the_report_has_a_row_for_every_figure_of_scale_and_its_goals_are_those_that_were_set() {
    let lines = lines(SCALE_LINES);
    let section = section("scale").expect("the report is of all benches, or of this one");
    for line in &lines {
        is_reported(line, section);
    }
    let judged = judged(&lines);
    let goal = |metric: &str| {
        let of = judged.iter().find(|line| line["metric"].as_str() == Some(metric));
        of.unwrap_or_else(|| panic!("{metric} has no goal"))["goal"].as_f64()
    };
    let statements = "statements of an idle Locker";
    for (what, interval) in [("led", "heartbeat"), ("stood by for", "retry")] {
        let one = lines.iter().find(|line| line["metric"] == format!("{statements}, by names {what}: 1"));
        let one = one.unwrap()["value"].as_f64().unwrap();
        let most = goal(&format!(
            "{statements}, by names {what}: 1,000, at most as 1 and one more per {interval} interval"
        ));
        assert!((most.unwrap() - one - 0.2).abs() < 0.001, "{what}: {most:?}, {one}");
    }
    assert_eq!(goal(&format!("{statements}: the busiest one of all")), Some(1.0));
    assert_eq!(goal("heartbeat, by foreign locks: what 10,000 add"), Some(20.0));
    assert_eq!(goal("poll of 100 names, by foreign locks: 10,000 to none"), Some(1.1));
    for what in ["locks held", "locks waited for", "names led", "names stood by for"] {
        assert_eq!(goal(&format!("memory, by {what}: slope")), Some(2.0));
    }
}

/// The report may be of some of the benches alone.
#[test]
fn what_the_report_has_of_other_benches_is_what_their_lines_say() {
    for (bench, text) in [("command", COMMAND_LINES), ("locks", LOCK_LINES)] {
        let Some(section) = section(bench) else { continue };
        for line in &lines(text) {
            is_reported(line, section);
        }
    }
}
