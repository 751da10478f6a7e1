//! `leasehold schema`: the SQL of the one table that leasehold has.

use std::process::ExitCode;

use clap::Args;
use leasehold::postgres::slots_schema;

use crate::output;

#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  leasehold schema | psql \"$DATABASE_URL\"               # the role that it will belong to, or a superuser
  leasehold schema --role=app | psql \"$ADMIN_URL\"       # for a role that may not make it

Only `leasehold once`, and `every` of the library, need the table; where their role may, they make it themselves. To run \
this again changes nothing.")]
pub(crate) struct Arguments {
    /// Let this role use it as well
    #[arg(long, value_name = "NAME")]
    role: Option<String>,
}

pub(crate) fn main(arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let role = arguments.role.as_deref().map(quoted);
    output::print(&slots_schema(role.as_deref()))?;
    Ok(ExitCode::SUCCESS)
}

/// As an identifier of SQL, whatever is in it.
fn quoted(role: &str) -> String {
    format!("\"{}\"", role.replace('"', "\"\""))
}
