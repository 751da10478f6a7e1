//! What a server is asked before anything is entrusted to it.

use std::collections::HashMap;

use redis::{Value, cmd};

use super::link::Link;
use super::refusal;
use crate::error::ConnectError;

/// The first version whose `SET` takes `NX` and `GET` together.
const OLDEST: u32 = 7;

/// What was found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Found {
    /// Changes with every start. None where that is not to be had.
    pub(super) run: Option<String>,
    pub(super) version: Option<String>,
    pub(super) is_replica: bool,
    pub(super) is_loading: bool,
    pub(super) is_cluster: bool,
    /// Keys go when memory is full.
    pub(super) evicts: Option<String>,
    pub(super) replicas: Option<u32>,
    pub(super) is_persistent: Option<bool>,
    /// Why that is not known.
    pub(super) denied: Option<String>,
}

/// Asks the server, or one node of a cluster.
pub(super) async fn look(link: &mut Link) -> Result<Found, ConnectError> {
    let mut info = cmd("INFO");
    info.arg(&["server", "replication", "memory", "persistence", "cluster"]);
    match link.ask(info).await.map_err(|error| refusal::of_connect(&error))? {
        Some(Ok(value)) => Ok(Found::read(&texts(value).join("\n"))),
        Some(Err(refusal)) if refusal.code == "NOPERM" => {
            Ok(Found { denied: Some(refusal.told()), ..Found::default() })
        }
        Some(Err(refusal)) => Err(refusal::of_answer(&refusal)),
        None => Ok(Found::default()),
    }
}

/// One text, or one of each node.
fn texts(value: Value) -> Vec<String> {
    match value {
        Value::BulkString(bytes) => vec![String::from_utf8_lossy(&bytes).into_owned()],
        Value::SimpleString(text) | Value::VerbatimString { text, .. } => vec![text],
        Value::Map(nodes) => nodes.into_iter().flat_map(|(_, text)| texts(text)).collect(),
        Value::Array(values) => values.into_iter().flat_map(texts).collect(),
        _ => Vec::new(),
    }
}

impl Found {
    fn read(info: &str) -> Self {
        // Of several nodes, the one that is worst in what matters: eviction.
        let lines = info.lines().filter_map(|line| line.trim_end().split_once(':'));
        let mut fields: HashMap<&str, Vec<&str>> = HashMap::new();
        for (key, value) in lines {
            fields.entry(key).or_default().push(value);
        }
        let field = |key: &str| fields.get(key).and_then(|values| values.first().copied());
        let number = |key: &str| field(key).and_then(|value| value.parse::<u64>().ok());
        let limits = fields.get("maxmemory").into_iter().flatten();
        let policies = fields.get("maxmemory_policy").into_iter().flatten();
        let evicts = limits
            .zip(policies)
            .find(|(limit, policy)| **limit != "0" && **policy != "noeviction")
            .map(|(_, policy)| (*policy).to_owned());
        Self {
            run: field("run_id").map(str::to_owned),
            version: field("valkey_version").or_else(|| field("redis_version")).map(str::to_owned),
            is_replica: field("role") == Some("slave"),
            is_loading: field("loading") == Some("1"),
            is_cluster: field("cluster_enabled") == Some("1"),
            evicts,
            replicas: number("connected_slaves").and_then(|it| it.try_into().ok()),
            is_persistent: number("aof_enabled").map(|it| it == 1),
            denied: None,
        }
    }

    /// Whether a session may be opened there.
    pub(super) fn judge(&self, as_cluster: bool) -> Result<(), ConnectError> {
        if let Some(version) = self.version.as_ref().filter(|version| !is_new_enough(version)) {
            return Err(ConnectError::TooOld { version: version.clone() });
        }
        if self.is_cluster != as_cluster && self.denied.is_none() {
            return Err(ConnectError::Cluster { is_cluster: self.is_cluster });
        }
        if self.is_loading {
            return Err(refusal::loading());
        }
        // Of a cluster, one node was asked, whichever it was.
        if self.is_replica && !as_cluster {
            return Err(ConnectError::Replica);
        }
        match &self.evicts {
            Some(policy) => Err(ConnectError::Evicts { policy: policy.clone() }),
            None => Ok(()),
        }
    }

    /// What is not in force, or not known to be.
    pub(super) fn shortfalls(&self) -> Vec<String> {
        let unknown = |why: &String| {
            format!(
                "whether the server evicts leases when its memory is full is not known ({why}): see that its \
                 maxmemory-policy is noeviction"
            )
        };
        self.denied.iter().map(unknown).collect()
    }
}

fn is_new_enough(version: &str) -> bool {
    version.split('.').next().and_then(|major| major.parse::<u32>().ok()).is_none_or(|major| major >= OLDEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    const INFO: &str = "# Server\r\nredis_version:7.0.15\r\nrun_id:abc\r\n\r\n# Memory\r\nmaxmemory:0\r\n\
        maxmemory_policy:allkeys-lru\r\n# Persistence\r\nloading:0\r\naof_enabled:1\r\n# Replication\r\nrole:master\r\n\
        connected_slaves:2\r\n# Cluster\r\ncluster_enabled:0\r\n";

    #[test]
    fn a_primary_that_keeps_its_keys_is_good() {
        let found = Found::read(INFO);
        assert_eq!(
            (found.run.as_deref(), found.replicas, found.is_persistent),
            (Some("abc"), Some(2), Some(true))
        );
        assert!(found.judge(false).is_ok() && found.shortfalls().is_empty());
        assert!(matches!(found.judge(true), Err(ConnectError::Cluster { is_cluster: false })));
    }

    ///
    #[test]
    fn what_cannot_be_relied_upon_is_refused() {
        let judged = |from: &str, to: &str| Found::read(&INFO.replace(from, to)).judge(false);
        assert!(
            matches!(judged("7.0.15", "6.2.14"), Err(ConnectError::TooOld { version }) if version == "6.2.14")
        );
        assert!(matches!(judged("role:master", "role:slave"), Err(ConnectError::Replica)));
        assert!(matches!(judged("loading:0", "loading:1"), Err(ConnectError::Unreachable { .. })));
        assert!(matches!(
            judged("cluster_enabled:0", "cluster_enabled:1"),
            Err(ConnectError::Cluster { .. })
        ));
        let evicts = judged("maxmemory:0", "maxmemory:1000");
        assert!(matches!(evicts, Err(ConnectError::Evicts { policy }) if policy == "allkeys-lru"));
        // Of several nodes, any.
        let nodes = format!("{INFO}\n{}", INFO.replace("maxmemory:0", "maxmemory:9"));
        assert!(matches!(Found::read(&nodes).judge(false), Err(ConnectError::Evicts { .. })));
    }
}
