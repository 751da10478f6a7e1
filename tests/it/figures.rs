//! The figures that were published: see `benches/failover`, `benches/command` and `benches/locks`.

use serde_json::Value;

const LINES: &str = include_str!("../../docs/figures/failover.jsonl");
const COMMAND_LINES: &str = include_str!("../../docs/figures/command.jsonl");
const LOCK_LINES: &str = include_str!("../../docs/figures/locks.jsonl");
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

#[test]
fn the_readme_has_a_row_for_every_goal_of_critical_sections() {
    let lines = lines(LOCK_LINES);
    let judged: Vec<&Value> = lines.iter().filter(|line| line["goal"].is_number()).collect();
    assert!(judged.len() >= 9, "{judged:?}");
    for line in judged {
        let number = |of: &str| line[of].as_f64();
        let is_reached = match line["goal_is"].as_str() {
            Some("value at most") => number("value") <= number("goal"),
            Some("ratio at most") => number("ratio") <= number("goal"),
            Some("ratio at least") => number("ratio") >= number("goal"),
            other => panic!("a goal that is {other:?}"),
        };
        assert_eq!(line["ok"].as_bool(), Some(is_reached), "{line}");
        is_told(line);
    }
}
