//! What was found out about a store: [`Diagnosis`], check by check.

use std::fmt;

use crate::error::ConnectError;
use crate::options::Bounds;

/// Whether a store can be used, and what to change: see [`diagnose`](crate::diagnose).
///
/// Shown as text it is a line for each check, and a last one that begins with `go` or `no-go`.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct Diagnosis {
    /// What was looked at, in that order.
    pub checks: Vec<Check>,
    /// What [`Locker::bounds`](crate::Locker::bounds) would say there. `None` where no session could be had.
    pub bounds: Option<Bounds>,
    /// What [`Locker::connect`](crate::Locker::connect) would fail with there.
    pub error: Option<ConnectError>,
}

/// One thing that was looked at.
///
/// Shown as text it is one line; in the alternate form (`{:#}`) without the verdict.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// Where, if the store's URL names several hosts.
    pub at: Option<String>,
    /// What was looked at. One or two words, which stay the same, so that scripts can look for them. On PostgreSQL:
    /// `reachable`, `login`, `version`, `tls`, `primary`, `pooler`, `session`, `locks`, `ttl`, `settings`, `wake-ups`,
    /// `connections`, `lock table`, `replication`, `latency`, and `hosts` where several are writable. On files:
    /// `directory`, `file system`, `wake-ups`, `locks`, `ttl`.
    pub what: &'static str,
    /// Whether it is as it should be.
    pub verdict: Verdict,
    /// What was found. Never with a secret.
    pub reason: String,
    /// What to change, unless it is good.
    pub remedy: Option<String>,
}

/// Whether a thing is as it should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verdict {
    /// It is.
    Good,
    /// It costs something, which the reason tells; the store can be used.
    Warning,
    /// The store cannot be used, or must not be.
    Bad,
}

impl Diagnosis {
    /// Tells whether the store can be used as it is: nothing is bad. There may be warnings.
    #[must_use]
    pub fn is_go(&self) -> bool {
        self.error.is_none() && self.count(Verdict::Bad) == 0
    }

    /// Tells whether trying again cannot help: the store must not be used as it is.
    ///
    /// Where it is false and [`is_go`](Self::is_go) is false too, the store cannot be used now: it is down, a replica, or
    /// refuses the login; a [`run`](crate::Locker::run) would wait for that to change.
    #[must_use]
    pub fn is_permanent(&self) -> bool {
        match &self.error {
            Some(error) => error.is_permanent(),
            None => !self.is_go(),
        }
    }

    fn count(&self, verdict: Verdict) -> usize {
        self.checks.iter().filter(|check| check.verdict == verdict).count()
    }

    /// The last line of the text: go or no-go.
    #[must_use]
    pub fn summary(&self) -> String {
        let (bad, warnings) = (self.count(Verdict::Bad), self.count(Verdict::Warning));
        let warned = match warnings {
            0 => String::new(),
            1 => ", with a warning".to_owned(),
            n => format!(", with {n} warnings"),
        };
        if self.is_go() {
            format!("go: the store can be used{warned}")
        } else if self.is_permanent() {
            format!(
                "no-go: the store must not be used as it is, {bad} of {} checks say so",
                self.checks.len()
            )
        } else {
            format!("no-go: the store cannot be used now: {bad} of {} checks failed", self.checks.len())
        }
    }
}

impl fmt::Display for Diagnosis {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            writeln!(f, "{check}")?;
        }
        f.write_str(&self.summary())
    }
}

impl Check {
    pub(crate) fn good(what: &'static str, reason: impl Into<String>) -> Self {
        Self { at: None, what, verdict: Verdict::Good, reason: reason.into(), remedy: None }
    }

    pub(crate) fn warning(what: &'static str, reason: impl Into<String>, remedy: impl Into<String>) -> Self {
        let remedy = Some(remedy.into());
        Self { at: None, what, verdict: Verdict::Warning, reason: reason.into(), remedy }
    }

    /// What an error that a session with the store cannot be had with says, cut in two: the reason, and what to change.
    pub(crate) fn bad(what: &'static str, error: &ConnectError, hint: Option<&str>) -> Self {
        let text = error.to_string();
        let remedy = error.remedy().or(hint);
        let reason = remedy.and_then(|remedy| text.strip_suffix(remedy)?.strip_suffix(": "));
        let reason = reason.unwrap_or(&text).to_owned();
        Self { at: None, what, verdict: Verdict::Bad, reason, remedy: remedy.map(str::to_owned) }
    }
}

impl fmt::Display for Check {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !f.alternate() {
            write!(f, "{:7} ", self.verdict)?;
        }
        if let Some(at) = &self.at {
            write!(f, "{at} ")?;
        }
        write!(f, "{}: {}", self.what, one_line(&self.reason))?;
        match &self.remedy {
            Some(remedy) => write!(f, " -> {}", one_line(remedy)),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Good => "good",
            Self::Warning => "warning",
            Self::Bad => "bad",
        })
    }
}

/// What a server says may have line ends, or worse for a terminal.
fn one_line(text: &str) -> String {
    text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_is_cut_into_its_reason_and_what_to_change() {
        let text = || "it said so".to_owned();
        for error in [
            ConnectError::Authentication { reason: text() },
            ConnectError::UnknownDatabase { reason: text() },
            ConnectError::Tls { reason: text() },
            ConnectError::Pooler { evidence: text() },
            ConnectError::UsedSession,
            ConnectError::NoSecondConnection { reason: text() },
            ConnectError::Replica,
            ConnectError::Unsupported { reason: text() },
            ConnectError::Directory { path: "/x".into(), remedy: "do this", source: "x".into() },
            ConnectError::NetworkFileSystem { path: "/x".into(), file_system: "NFS" },
        ] {
            let check = Check::bad("it", &error, None);
            let remedy = check.remedy.unwrap();
            assert_eq!(format!("{}: {remedy}", check.reason), error.to_string());
        }
        let error = ConnectError::Unreachable { reason: "full: make room".to_owned() };
        let check = Check::bad("it", &error, Some("make room"));
        assert_eq!(check.to_string(), "bad     it: the store cannot be reached: full -> make room");
        assert_eq!(Check::bad("it", &error, None).reason, error.to_string());
    }

    #[test]
    fn a_diagnosis_is_go_unless_something_is_bad_and_says_whether_it_can_mend_itself() {
        let checks = vec![Check::good("a", "a\nb"), Check::warning("b", "slow", "hurry")];
        let mut diagnosis = Diagnosis { checks, ..Diagnosis::default() };
        assert!(diagnosis.is_go() && !diagnosis.is_permanent());
        assert_eq!(
            diagnosis.to_string(),
            "good    a: a b\nwarning b: slow -> hurry\ngo: the store can be used, with a warning"
        );
        diagnosis.checks.push(Check::bad("c", &ConnectError::Replica, None));
        assert!(!diagnosis.is_go() && diagnosis.is_permanent());
        diagnosis.error = Some(ConnectError::Replica);
        assert!(!diagnosis.is_go() && !diagnosis.is_permanent());
        assert_eq!(diagnosis.summary(), "no-go: the store cannot be used now: 1 of 3 checks failed");
    }
}
