//! Reads `postgres://` URLs, also those that name several hosts, as libpq writes them: `postgres://a,b:5433/db`, or
//! `?host=a,b&port=5432,5433`.

use std::str::FromStr as _;

use sqlx::postgres::PgConnectOptions;

use crate::error::UrlError;

/// What may stand behind the question mark. sqlx ignores anything else, and prints it with its value, which may be a
/// misspelt password.
const PARAMETERS: [&str; 18] = [
    "application_name",
    "dbname",
    "host",
    "hostaddr",
    "options",
    "password",
    "port",
    "ssl-ca",
    "ssl-cert",
    "ssl-key",
    "ssl-mode",
    "ssl-root-cert",
    "sslcert",
    "sslkey",
    "sslmode",
    "sslrootcert",
    "statement-cache-capacity",
    "user",
];

/// Of libpq: sqlx does not know them, and ignoring them would be a surprise.
const WITHOUT_EFFECT: [&str; 4] =
    ["channel_binding", "connect_timeout", "fallback_application_name", "load_balance_hosts"];

/// Of libpq too, and with two values it says what is done anyway.
const SESSION_ATTRIBUTES: &str = "target_session_attrs";

/// Reads a URL: the servers that it names, in their order. What it cannot use it names without any value: that may be
/// a secret.
pub(crate) fn targets_of_url(url: &str) -> Result<Vec<PgConnectOptions>, UrlError> {
    let url = Parts::of(url);
    for (key, value) in url.parameters() {
        check(key, value)?;
    }
    let hosts = url.hosts()?;
    hosts.iter().map(|host| options_of(&url.with(host))).collect()
}

fn check(key: &str, value: &str) -> Result<(), UrlError> {
    if WITHOUT_EFFECT.contains(&key) {
        return Err(refused(format!("leave out {key:?}, which has no effect here")));
    }
    if key == SESSION_ATTRIBUTES {
        return match value {
            "primary" | "read-write" => Ok(()),
            _ => Err(refused(format!("leave out {key:?}: it is always the primary that is looked for"))),
        };
    }
    if PARAMETERS.contains(&key) || key.starts_with("options[") {
        return Ok(());
    }
    // Something that is no word may be the rest of a password with a question mark in it.
    let is_word = key.len() < 32 && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_' || b == b'-');
    let what = if is_word { format!("the parameter {key:?}") } else { "a parameter".to_owned() };
    Err(refused(format!(
        "it has {what}, which is unknown; percent-encode what is special in a user or password"
    )))
}

fn options_of(url: &str) -> Result<PgConnectOptions, UrlError> {
    PgConnectOptions::from_str(url).map_err(|_| {
        refused(
            "write postgres://user:password@host:5432/database?sslmode=verify-full, and percent-encode what is special \
             in a user or password"
                .to_owned(),
        )
    })
}

fn refused(remedy: String) -> UrlError {
    UrlError::Postgres { remedy }
}

/// A URL, cut where the hosts are.
struct Parts<'a> {
    /// Up to the hosts: scheme, user and password.
    head: &'a str,
    hosts: &'a str,
    path: &'a str,
    query: &'a str,
}

/// One host of a list, and its port if it is named.
enum Host<'a> {
    /// As the URL has it, its port included.
    InUrl(&'a str),
    /// By parameters: which one, the host, the port.
    InQuery(&'a str, &'a str, Option<&'a str>),
}

impl<'a> Parts<'a> {
    fn of(url: &'a str) -> Self {
        let (url, _) = url.split_once('#').unwrap_or((url, ""));
        let (url, query) = url.split_once('?').unwrap_or((url, ""));
        let authority = url.find("://").map_or(url.len(), |at| at + 3);
        let path = url[authority..].find('/').map_or(url.len(), |at| authority + at);
        let hosts = url[..path].rfind('@').map_or(authority, |at| (at + 1).max(authority));
        Self { head: &url[..hosts], hosts: &url[hosts..path], path: &url[path..], query }
    }

    fn parameters(&self) -> impl Iterator<Item = (&'a str, &'a str)> {
        let pairs = self.query.split('&').filter(|pair| !pair.is_empty());
        pairs.map(|pair| pair.split_once('=').unwrap_or((pair, "")))
    }

    fn hosts(&self) -> Result<Vec<Host<'a>>, UrlError> {
        // Only what stands before the hosts has one: the rest is the end of a password with a slash in it.
        if self.path.contains('@')
            || self.parameters().any(|(key, value)| key.contains("host") && value.contains('@'))
        {
            return Err(refused("percent-encode what is special in a user or password".to_owned()));
        }
        let parameter = |wanted| self.parameters().filter(|(key, _)| *key == wanted).last();
        let Some((key, hosts)) = parameter("hostaddr").or_else(|| parameter("host")) else {
            return named(self.hosts.split(',').collect(), Host::InUrl);
        };
        let ports: Vec<&str> = parameter("port").map_or(Vec::new(), |(_, ports)| list(ports));
        let hosts = list(hosts);
        // One port is that of every host.
        let port_of = |n: usize| if ports.len() == 1 { ports.first() } else { ports.get(n) }.copied();
        if ports.len() > 1 && ports.len() != hosts.len() {
            return Err(refused(format!("it names {} hosts and {} ports", hosts.len(), ports.len())));
        }
        let mut numbers = 0..;
        named(hosts, |host| Host::InQuery(key, host, numbers.next().and_then(port_of)))
    }

    /// The URL with one host alone.
    fn with(&self, host: &Host<'_>) -> String {
        let mut parameters: Vec<String> = self
            .parameters()
            .filter(|(key, _)| match host {
                Host::InQuery(..) => !["host", "hostaddr", "port"].contains(key),
                Host::InUrl(_) => true,
            })
            .filter(|(key, _)| *key != SESSION_ATTRIBUTES)
            .map(|(key, value)| format!("{key}={value}"))
            .collect();
        let authority = match host {
            Host::InUrl(host) => host,
            Host::InQuery(key, host, port) => {
                parameters.push(format!("{key}={host}"));
                parameters.extend(port.map(|port| format!("port={port}")));
                self.hosts
            }
        };
        format!("{}{authority}{}?{}", self.head, self.path, parameters.join("&"))
    }
}

/// The elements of a list in a parameter, where the comma may be encoded.
fn list(text: &str) -> Vec<&str> {
    text.split(',').flat_map(|part| part.split("%2C")).flat_map(|part| part.split("%2c")).collect()
}

/// The hosts of a list. One alone may be empty: that is the default.
fn named<'a>(hosts: Vec<&'a str>, host: impl FnMut(&'a str) -> Host<'a>) -> Result<Vec<Host<'a>>, UrlError> {
    if hosts.len() > 1 && hosts.iter().any(|host| host.is_empty()) {
        return Err(refused("its list of hosts has an empty one".to_owned()));
    }
    Ok(hosts.into_iter().map(host).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(url: &str) -> PgConnectOptions {
        let mut targets = targets_of_url(url).unwrap();
        assert_eq!(targets.len(), 1, "{url}");
        targets.remove(0)
    }

    fn hosts(url: &str) -> Vec<(String, u16)> {
        let targets = targets_of_url(url).unwrap_or_else(|error| panic!("{url}: {error}"));
        let host = |target: &PgConnectOptions| (target.get_host().to_owned(), target.get_port());
        targets.iter().map(host).collect()
    }

    #[test]
    fn a_url_is_read() {
        let options = one("postgres://app:s%23cret@db.example:6432/app?sslmode=disable");
        assert_eq!(options.get_host(), "db.example");
        assert_eq!(options.get_port(), 6432);
        assert_eq!(options.get_username(), "app");
        assert_eq!(options.get_database(), Some("app"));
        one("postgresql:///app?host=/run/postgresql&user=app");
    }

    #[test]
    fn several_hosts_are_read_in_their_order() {
        let three = [("a".to_owned(), 5432), ("b".to_owned(), 5433), ("c".to_owned(), 5432)];
        for url in [
            "postgres://a,b:5433,c/db",
            "postgres://app:x@a,b:5433,c/db?sslmode=disable",
            "postgres://app:x@a,b:5433,c:5432/db?target_session_attrs=read-write#there",
            "postgres:///db?host=a,b,c&port=5432,5433,5432",
            "postgres:///db?host=a%2Cb%2cc&port=5432,5433,5432&target_session_attrs=primary",
        ] {
            assert_eq!(hosts(url), three, "{url}");
            for target in targets_of_url(url).unwrap() {
                assert_eq!(target.get_database(), Some("db"), "{url}");
            }
        }
        let same = [("a".to_owned(), 6000), ("b".to_owned(), 6000)];
        assert_eq!(hosts("postgres:///db?host=a,b&port=6000"), same);
        assert_eq!(hosts("postgres://[::1]:5433,b/db")[1], ("b".to_owned(), 5432));
        assert_eq!(hosts("postgres://app:p,w@a/db"), [("a".to_owned(), 5432)]);
    }

    #[test]
    fn a_list_of_hosts_that_cannot_be_meant_is_refused() {
        for (url, what) in [
            ("postgres://a,,c/db", "empty"),
            ("postgres://a,/db", "empty"),
            ("postgres:///db?host=a,&port=1", "empty"),
            ("postgres:///db?host=a,b,c&port=1,2", "3 hosts and 2 ports"),
            ("postgres://a,b:port/db", "write postgres://"),
            ("postgres://a,b/db?target_session_attrs=standby", "primary"),
        ] {
            let text = targets_of_url(url).expect_err(url).to_string();
            assert!(text.contains(what), "{url}: {text}");
        }
    }

    /// F-28: what cannot be read is refused without what may be a secret.
    #[test]
    fn a_bad_url_is_refused_without_its_secret() {
        for url in [
            "postgres://app:hunter2@db:port/app",
            "postgres://app:hunter2@db/app?sslmode=hunter2",
            "postgres://app:x@db/app?pasword=hunter2",
            "postgres://app:x@db/app?connect_timeout=hunter2",
            "postgres://app:?Hunter2hunter2@db/app",
            "postgres://app:hunter2@db/app?port=hunter2",
            "postgres://app:hunter2@a,b:port/app",
            "postgres://app:1,hunter2/x@db:1/app",
            "postgres://db/app?host=app:hunter2@a,b",
            "postgres://app:hunter2@a,,b/app",
            "postgres://app:x@db/app?target_session_attrs=hunter2",
        ] {
            let error = targets_of_url(url).expect_err(url);
            let text = format!("{error} {error:?}");
            assert!(!text.to_lowercase().contains("hunter2"), "{text}");
        }
        let text = targets_of_url("postgres://db/app?pasword=x").unwrap_err().to_string();
        assert!(text.contains("pasword"), "{text}");
    }
}
