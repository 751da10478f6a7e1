//! `leasehold key`: the number that a name stands for, and who holds it, in SQL; its key on Redis.

use std::process::ExitCode;

use clap::{Args, ValueEnum};
use leasehold::{Key, Kind, Name};

use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold key sweeper
  leasehold key --kind=rwlock invoices    # of `leasehold lock invoices`
  psql \"$DATABASE_URL\" -c \"$(leasehold key sweeper --sql)\"")]
pub(crate) struct Arguments {
    /// The name
    name: String,
    /// What the name is of
    #[arg(long, value_enum, default_value = "lease")]
    kind: KindArgument,
    /// Print the SQL alone
    #[arg(long, conflicts_with = "json")]
    sql: bool,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum KindArgument {
    /// `leasehold run`, and `locker.run` or `candidate` of the library
    Lease,
    /// `leasehold lock --kind=lock` and `once`, and `locker.lock` and `every` of the library
    Lock,
    /// `leasehold lock`, and `locker.rw_lock` of the library
    Rwlock,
}

pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let Arguments { name, kind, sql, json } = arguments;
    let name = Name::from(name.as_str());
    name.validate().map_err(leasehold::Error::from)?;
    let kind = match kind {
        KindArgument::Lease => Kind::Lease,
        KindArgument::Lock => Kind::Lock,
        KindArgument::Rwlock => Kind::RwLock,
    };
    let key = Key::of(kind, &name);
    let holder = holder_sql(key);
    #[cfg(feature = "redis")]
    let redis = String::from_utf8_lossy(&leasehold::redis::holder_key(kind, &name)).into_owned();
    let text = if *json {
        #[cfg_attr(not(feature = "redis"), expect(unused_mut, reason = "for the key on Redis"))]
        let mut object = serde_json::json!({
            "name": name.as_str(), "key": key.get().to_string(), "hex": key.to_string(), "holder_sql": holder,
        });
        #[cfg(feature = "redis")]
        {
            object["redis_key"] = redis.into();
        }
        object.to_string()
    } else if *sql {
        holder
    } else {
        let on_postgres = format!("{}\n\n-- who holds it, on PostgreSQL:\n{holder}", key.get());
        #[cfg(feature = "redis")]
        // In single quotes, as a shell takes them.
        let on_redis = format!("\n\n# on Redis:\nredis-cli GET '{}'", redis.replace('\'', "'\\''"));
        #[cfg(not(feature = "redis"))]
        let on_redis = "";
        format!("{on_postgres}{on_redis}")
    };
    output::print(&format!("{text}\n"))?;
    Ok(ExitCode::SUCCESS)
}

/// The halves of a key are what the lock table shows.
fn holder_sql(key: Key) -> String {
    let (bits, space) = (key.get().cast_unsigned(), if key.pair().is_some() { 2 } else { 1 });
    format!(
        "SELECT a.pid, a.application_name, a.client_addr, a.backend_start, a.state_change\n\
         FROM pg_locks l JOIN pg_stat_activity a USING (pid)\n\
         WHERE l.locktype = 'advisory' AND l.granted AND l.objsubid = {space}\n  \
         AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())\n  \
         AND l.classid = {} AND l.objid = {};",
        bits >> 32,
        bits & 0xffff_ffff,
    )
}
