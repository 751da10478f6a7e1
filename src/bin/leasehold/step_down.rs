//! `leasehold step-down`: asks the leader of a name to hand over, and says who took over.

use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::Args;
use leasehold::{Handover, Name, Observer, Participant};

use crate::common::Common;
use crate::status::participant_text;
use crate::{exit, output};

#[derive(Debug, Args)]
#[command(after_help = "\
The leader's job is told to stop; when it has, a standby takes over. The one that handed over stands by again.

Exit codes: 0 asked, or with --wait taken over; 67 nobody leads; 75 nobody has taken over within --timeout; 77 the leader \
does not hand over when it is asked to (answer_step_down=false).

Examples:
  leasehold step-down sweeper
  leasehold step-down sweeper --wait --timeout 30s")]
pub(crate) struct Arguments {
    /// The name
    name: String,
    /// Wait until a new term has begun, and say whose
    #[arg(long)]
    wait: bool,
    /// With --wait: how long at most, such as 30s
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration, requires = "wait")]
    timeout: Option<Duration>,
}

pub(crate) fn main(common: &Common, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let name = Name::from(arguments.name.as_str());
    name.validate().map_err(leasehold::Error::from)?;
    crate::runtime()?.block_on(async {
        let observer = common.observer().await?;
        let asked = if arguments.wait {
            wait(&observer, &name, arguments.timeout).await
        } else {
            ask(&observer, &name).await
        };
        observer.close().await;
        asked
    })
}

async fn ask(observer: &Observer, name: &Name) -> anyhow::Result<ExitCode> {
    match observer.snapshot().await?.of(name).leader {
        None => Ok(nobody_leads(observer, name)),
        Some(leader) if leader.answers_step_down == Some(false) => Ok(refused(&leader)),
        Some(leader) => {
            observer.step_down(name).await?;
            if leader.role.is_none() {
                output::complain(format_args!(
                    "{} does not answer: it may not have heard",
                    participant_text(&leader)
                ));
            }
            output::print(&format!("asked {}\n", participant_text(&leader)))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn wait(observer: &Observer, name: &Name, timeout: Option<Duration>) -> anyhow::Result<ExitCode> {
    let handover = observer.hand_over(name);
    let handover = if let Some(limit) = timeout {
        let Ok(handover) = tokio::time::timeout(limit, handover).await else {
            let limit = humantime::format_duration(limit);
            output::complain(format_args!(
                "asked, and nobody has taken over {} within {limit}",
                output::name(name)
            ));
            return Ok(ExitCode::from(exit::NOT_ACQUIRED));
        };
        handover?
    } else {
        handover.await?
    };
    match handover {
        Handover::NobodyLeads => Ok(nobody_leads(observer, name)),
        Handover::Refused { leader } => Ok(refused(&leader)),
        Handover::TakenOver { from, by } => {
            let who = participant_text(&by);
            let text = if from.identity == by.identity {
                format!("{who} leads again: nobody else stood by\n")
            } else {
                format!("{who} leads, after {}\n", participant_text(&from))
            };
            output::print(&text)?;
            Ok(ExitCode::SUCCESS)
        }
        other => Err(anyhow::anyhow!("{other:?}")).context("this handover is unknown"),
    }
}

fn nobody_leads(observer: &Observer, name: &Name) -> ExitCode {
    output::complain(format_args!(
        "nobody leads {} on {}: nobody was asked",
        output::name(name),
        observer.address()
    ));
    ExitCode::from(exit::NOBODY_LEADS)
}

fn refused(leader: &Participant) -> ExitCode {
    output::complain(format_args!(
        "{} does not hand over when it is asked to (answer_step_down=false): nobody was asked",
        participant_text(leader)
    ));
    ExitCode::from(exit::NOT_PERMITTED)
}
