//! Reads `redis://` URLs, also those of clusters: `redis+cluster://a:6379,b:6379`.

use redis::{ConnectionInfo, IntoConnectionInfo as _};

use crate::error::UrlError;
use crate::redis::{Layout, Target};

/// What may stand behind the question mark and is the client's own business.
const PARAMETERS: [&str; 4] = ["protocol", "db", "user", "pass"];

const EXAMPLE: &str = "write redis://user:password@host:6379/0, rediss:// for TLS, or redis+cluster://host:6379,host:6379, \
    and percent-encode what is special in a user or password";

/// Tells whether the scheme is one of these.
pub(crate) fn is_ours(scheme: &str) -> bool {
    matches!(
        scheme,
        "redis"
            | "rediss"
            | "valkey"
            | "valkeys"
            | "redis+unix"
            | "valkey+unix"
            | "redis+cluster"
            | "rediss+cluster"
    )
}

/// Reads a URL. What it cannot use it names without any value: that may be a secret.
pub(crate) fn target_of_url(url: &str) -> Result<Target, UrlError> {
    let (url, fragment) = url.split_once('#').map_or((url, None), |(url, fragment)| (url, Some(fragment)));
    if fragment.is_some() {
        return Err(refused(
            "nothing can stand behind a #: certificates are always looked at, and in a user or password it is written %23",
        ));
    }
    let (url, query) = url.split_once('?').unwrap_or((url, ""));
    let (scheme, rest) = url.split_once("://").ok_or_else(|| refused(EXAMPLE))?;
    let scheme = scheme.to_ascii_lowercase();
    let (mut layout, mut replicas, mut others) = (Layout::default(), 0, Vec::new());
    for pair in query.split('&').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
        match (key, value) {
            ("layout", "leasehold") => layout = Layout::Leasehold,
            ("layout", "wakuwaku") => layout = Layout::Wakuwaku,
            ("layout", _) => return Err(refused("the layout is leasehold or wakuwaku")),
            ("wait_for_replicas", count) => {
                replicas = count.parse().map_err(|_| {
                    refused("wait_for_replicas is how many replicas have to acknowledge a grant")
                })?;
            }
            (key, _) if PARAMETERS.contains(&key) => others.push(pair),
            _ => return Err(refused(&unknown(key, query.contains('@')))),
        }
    }
    if scheme.starts_with("rediss") | scheme.starts_with("valkeys") && cfg!(not(feature = "tls")) {
        return Err(UrlError::FeatureOff { scheme, feature: "tls" });
    }
    let tail = if others.is_empty() { String::new() } else { format!("?{}", others.join("&")) };
    let target = match scheme.strip_suffix("+cluster") {
        None => Target::from(info_of(&format!("{scheme}://{rest}{tail}"))?),
        Some(_) if replicas > 0 => return Err(refused("wait_for_replicas is not for a cluster")),
        Some(scheme) => {
            let (user, hosts) = rest.rsplit_once('@').map_or(("", rest), |(user, hosts)| (user, hosts));
            let at = if user.is_empty() { "" } else { "@" };
            let hosts = hosts.trim_end_matches('/').split(',');
            let nodes = hosts.map(|host| info_of(&format!("{scheme}://{user}{at}{host}{tail}")));
            let nodes = nodes.collect::<Result<Vec<_>, _>>()?;
            if nodes.iter().any(|node| node.redis_settings().db() != 0) {
                return Err(refused("a cluster has no databases: leave out the number"));
            }
            Target::cluster(nodes).map_err(|_| refused(EXAMPLE))?
        }
    };
    Ok(target.layout(layout).wait_for_replicas(replicas))
}

/// What the client says of a URL is not shown.
fn info_of(url: &str) -> Result<ConnectionInfo, UrlError> {
    url.into_connection_info().map_err(|_| refused(EXAMPLE))
}

fn unknown(key: &str, may_be_password: bool) -> String {
    // Something that is no word, or stands before the host, may be the rest of a password with a question mark in it.
    let is_word = !may_be_password
        && key.len() < 32
        && key.bytes().all(|b| b.is_ascii_lowercase() || b == b'_' || b == b'-');
    let what = if is_word { format!("the parameter {key:?}") } else { "a parameter".to_owned() };
    format!("it has {what}, which is unknown; percent-encode what is special in a user or password")
}

fn refused(remedy: &str) -> UrlError {
    UrlError::Redis { remedy: remedy.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::redis::Place;

    fn read(url: &str) -> Result<Target, UrlError> {
        target_of_url(url)
    }

    #[test]
    fn urls_of_servers_and_clusters_are_read() {
        let target = read("redis://me:secret@cache:6380/3?layout=wakuwaku&wait_for_replicas=2").unwrap();
        assert_eq!(target.place.to_string(), "cache:6380/3");
        assert_eq!((target.layout, target.replicas), (Layout::Wakuwaku, 2));
        assert!(!format!("{target:?}").contains("secret"));
        let Place::Server(info) = &target.place else { panic!("{target:?}") };
        assert_eq!(info.redis_settings().password(), Some("secret"));
        let cluster = read("redis+cluster://:secret@a,b:7001").unwrap();
        assert_eq!(cluster.place.to_string(), "a:6379,b:7001");
        let Place::Cluster(nodes) = &cluster.place else { panic!("{cluster:?}") };
        assert!(nodes.iter().all(|node| node.redis_settings().password() == Some("secret")));
    }

    #[cfg(feature = "tls")]
    #[test]
    fn tls_is_by_scheme() {
        for url in ["rediss://cache", "rediss+cluster://a,b", "valkeys://cache"] {
            let target = read(url).unwrap();
            let info = match &target.place {
                Place::Server(info) => info,
                Place::Cluster(nodes) => &nodes[0],
            };
            assert!(matches!(info.addr(), redis::ConnectionAddr::TcpTls { insecure: false, .. }), "{url}");
        }
    }

    #[test]
    fn what_cannot_be_used_is_told_without_a_value() {
        for url in [
            "redis://cache?sslmode=verysecret",
            "redis://cache?layout=verysecret",
            "redis://cache?wait_for_replicas=verysecret",
            "redis://cache/verysecret",
            "redis+cluster://a,b/1",
            "redis+cluster://a,b?wait_for_replicas=1",
            "redis:verysecret",
            "rediss://cache#insecure",
            "redis://me:very#verysecret@cache",
            "redis://me:very?verysecret=1@cache",
        ] {
            let told = read(url).unwrap_err().to_string();
            assert!(!told.contains("verysecret"), "{told}");
        }
    }
}
