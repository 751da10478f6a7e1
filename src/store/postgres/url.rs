//! Reads `postgres://` URLs.

use std::str::FromStr as _;

use sqlx::postgres::PgConnectOptions;

use crate::error::UrlError;

/// What may stand behind the question mark. sqlx ignores anything else, and prints it with its value, which may be a
/// misspelt password.
const PARAMETERS: [&str; 22] = [
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
    // Of libpq: they are known to do no harm where they are ignored, but say so.
    "connect_timeout",
    "fallback_application_name",
    "target_session_attrs",
    "channel_binding",
];

/// How many of them, from the end, sqlx does not know.
const IGNORED: usize = 4;

/// Reads a URL. What it cannot use it names without any value: that may be a secret.
pub(crate) fn options_of_url(url: &str) -> Result<PgConnectOptions, UrlError> {
    let query = url.split_once('?').map_or("", |(_, query)| query);
    let query = query.split('#').next().unwrap_or_default();
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let key = parameter.split('=').next().unwrap_or_default();
        let (known, ignored) = PARAMETERS.split_at(PARAMETERS.len() - IGNORED);
        if ignored.contains(&key) {
            return Err(refused(format!("leave out {key:?}, which has no effect here")));
        }
        if !known.contains(&key) && !key.starts_with("options[") {
            // Something that is no word may be the rest of a password with a question mark in it.
            let is_word =
                key.len() < 32 && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_' || b == b'-');
            let what = if is_word { format!("the parameter {key:?}") } else { "a parameter".to_owned() };
            return Err(refused(format!(
                "it has {what}, which is unknown; percent-encode what is special in a user or password"
            )));
        }
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_is_read() {
        let options = options_of_url("postgres://app:s%23cret@db.example:6432/app?sslmode=disable").unwrap();
        assert_eq!(options.get_host(), "db.example");
        assert_eq!(options.get_port(), 6432);
        assert_eq!(options.get_username(), "app");
        assert_eq!(options.get_database(), Some("app"));
        assert!(options_of_url("postgresql:///app?host=/run/postgresql&user=app").is_ok());
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
        ] {
            let error = options_of_url(url).expect_err(url);
            let text = format!("{error} {error:?}");
            assert!(!text.to_lowercase().contains("hunter2"), "{text}");
        }
        let text = options_of_url("postgres://db/app?pasword=x").unwrap_err().to_string();
        assert!(text.contains("pasword"), "{text}");
    }
}
