//! The settings of a session, made by SET, since poolers refuse start-up options, and read back, since a setting may be
//! missing, forbidden or without effect. What is not in force is a warning, and lowers what the session promises.

use std::collections::HashMap;
use std::time::Duration;

use sqlx::Row as _;
use tracing::warn;

use super::statements::{APPLICATION, quoted};
use super::{Config, checks::Backend, link::Link, refusal};
use crate::error::ConnectError;
use crate::store::Enforcement;

/// Longest wait for a lock inside of the server. Only the commit of a notification ever waits: it queues behind a lock
/// of the whole cluster. Giving up leaves the release done, and the standbys to their polls.
const MAX_LOCK_TIMEOUT: Duration = Duration::from_secs(1);

/// Since PostgreSQL 17. Where there is no such setting there is no row, and nothing is set.
const NO_TRANSACTION_TIMEOUT: &str = "SELECT pg_catalog.set_config(name, '0', false) FROM pg_catalog.pg_settings \
    WHERE name = 'transaction_timeout';";

/// A row beside those of the settings.
const OVER_TCP: &str = "over TCP";

/// How many keepalive probes may go unanswered.
const PROBES: u32 = 5;

/// Longest interval of keepalives that Linux takes, in seconds.
const MAX_KEEPALIVE: u64 = 32_767;

struct Setting {
    name: &'static str,
    /// As SET takes it and as `pg_settings` shows it, in the setting's own unit.
    value: String,
    /// What is lost without it.
    matter: Matter,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Matter {
    /// The server would not free the lease of a silent holder in time.
    FreesSilentHolders,
    /// It backs up what another one does, or keeps a default of the role from doing harm.
    Precaution,
    /// It backs up what another one does, where the server is reached by TCP. What reaches it by a Unix socket may be a
    /// pooler that is reached by TCP: the server tells.
    OverTcp,
}

/// What of the settings is in force.
#[derive(Debug)]
pub(super) struct InForce {
    pub(super) enforcement: Enforcement,
    pub(super) missing: Vec<Missing>,
}

/// A setting that is not in force.
#[derive(Debug)]
pub(super) struct Missing {
    pub(super) name: &'static str,
    pub(super) wanted: String,
    /// `None`: the server has no such setting.
    pub(super) found: Option<String>,
    matter: Matter,
}

impl Missing {
    pub(super) fn frees_silent_holders(&self) -> bool {
        self.matter == Matter::FreesSilentHolders
    }

    pub(super) fn found(&self) -> &str {
        self.found.as_deref().unwrap_or("no such setting")
    }
}

impl InForce {
    /// A sentence for each thing that the server does not enforce.
    pub(super) fn shortfalls(&self) -> Vec<String> {
        let silent = self.missing.iter().filter(|missing| missing.frees_silent_holders());
        let sentence = |missing: &Missing| {
            let (Missing { name, wanted, .. }, found) = (missing, missing.found());
            format!(
                "the server may keep the leases of a silent holder: {name} should be {wanted} ms, and is {found}"
            )
        };
        silent.map(sentence).collect()
    }

    pub(super) fn warn(&self, backend: &Backend, config: &Config) {
        for missing in &self.missing {
            warn!(
                identity = config.identity,
                pid = backend.pid,
                setting = missing.name,
                wanted = missing.wanted,
                found = missing.found(),
                frees_silent_holders = self.enforcement.frees_silent_holders,
                "a setting of the session is not in force"
            );
        }
    }
}

/// Makes the settings and reads them back.
pub(super) async fn apply(link: &mut Link, config: &Config) -> Result<InForce, ConnectError> {
    let settings = settings(config);
    let all: String = settings.iter().map(Setting::sql).chain([NO_TRANSACTION_TIMEOUT.to_owned()]).collect();
    if let Err(error) = link.fetch(all).await {
        // One that the server lacks undoes them all: one by one, then. Those that fail show when they are read back.
        let Some((_, reason)) = refusal::answered(&error) else { return Err(refusal::of_statement(error)) };
        tracing::debug!(identity = config.identity, reason, "a setting was refused");
        for setting in &settings {
            match link.fetch(setting.sql()).await {
                Ok(_) => {}
                Err(error) if refusal::answered(&error).is_some() => {}
                Err(error) => return Err(refusal::of_statement(error)),
            }
        }
    }
    let mut in_force = read_back(link, &settings).await.map_err(refusal::of_statement)?;
    let is_over_tcp = in_force.remove(OVER_TCP).is_some_and(|it| it == "true");
    let missing: Vec<Missing> = settings
        .into_iter()
        .filter(|setting| is_over_tcp || setting.matter != Matter::OverTcp)
        .filter_map(|Setting { name, value, matter }| {
            let found = in_force.remove(name);
            (found.as_ref() != Some(&value)).then_some(Missing { name, wanted: value, found, matter })
        })
        .collect();
    let frees_silent_holders = !missing.iter().any(Missing::frees_silent_holders);
    Ok(InForce {
        enforcement: Enforcement { frees_silent_holders, any_answer_renews: true, reconnects: false },
        missing,
    })
}

async fn read_back(link: &mut Link, settings: &[Setting]) -> Result<HashMap<String, String>, sqlx::Error> {
    let names: Vec<_> = settings.iter().map(|setting| format!("'{}'", setting.name)).collect();
    let sql = format!(
        "SELECT name, setting FROM pg_catalog.pg_settings WHERE name IN ({}) UNION ALL \
         SELECT '{OVER_TCP}', (pg_catalog.inet_client_addr() IS NOT NULL)::text",
        names.join(",")
    );
    link.fetch(sql).await?.iter().map(|row| Ok((row.try_get(0)?, row.try_get(1)?))).collect()
}

fn settings(config: &Config) -> Vec<Setting> {
    use Matter::{FreesSilentHolders, OverTcp, Precaution};

    let Config { identity, query_timeout, trust, ttl, .. } = config;
    let ms = |duration: Duration| duration.as_millis().clamp(1, i32::MAX as u128).to_string();
    let lock_timeout = MAX_LOCK_TIMEOUT.min(*query_timeout / 4);
    let mut settings = vec![
        // First, so that nothing of a role's search path stands before the catalogue any more.
        ("search_path", "pg_catalog".to_owned(), Precaution),
        ("application_name", format!("{APPLICATION}{identity}"), Precaution),
        // The two clocks of the server: between statements, and within one.
        ("idle_session_timeout", ms(*ttl), FreesSilentHolders),
        ("statement_timeout", ms(*query_timeout), FreesSilentHolders),
        ("lock_timeout", ms(lock_timeout), Precaution),
        ("idle_in_transaction_session_timeout", "0".to_owned(), Precaution),
        ("default_transaction_read_only", "off".to_owned(), Precaution),
        ("default_transaction_isolation", "read committed".to_owned(), Precaution),
        ("default_transaction_deferrable", "off".to_owned(), Precaution),
        ("client_connection_check_interval", ms(lock_timeout), Precaution),
    ];
    if !config.ends_silent_sessions {
        settings.retain(|(name, ..)| *name != "idle_session_timeout");
        return settings.into_iter().map(Setting::from).collect();
    }
    // These back the idle limit up, should the server wait for us to read. They must not fire before it.
    let limit = *ttl + *trust;
    let idle = (limit / 2).as_secs() + 1;
    let interval = idle.div_ceil(u64::from(PROBES));
    settings.push(("tcp_user_timeout", ms(limit), OverTcp));
    settings.push(("tcp_keepalives_idle", idle.min(MAX_KEEPALIVE).to_string(), OverTcp));
    settings.push(("tcp_keepalives_interval", interval.min(MAX_KEEPALIVE).to_string(), OverTcp));
    settings.push(("tcp_keepalives_count", PROBES.to_string(), OverTcp));
    settings.into_iter().map(Setting::from).collect()
}

impl From<(&'static str, String, Matter)> for Setting {
    fn from((name, value, matter): (&'static str, String, Matter)) -> Self {
        Self { name, value, matter }
    }
}

impl Setting {
    fn sql(&self) -> String {
        format!("SET {} = {};", self.name, quoted(&self.value))
    }
}
