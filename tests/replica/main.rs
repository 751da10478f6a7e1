//! A replica for the integration tests: a process that contends for one name, and writes what its job does to a log.
//!
//! `leasehold-replica URL NAME OPTIONS LOG BEHAVIOUR`. The log's lines are `<identity> start|tick|end <term>`, each
//! appended in one write. It ends in order when its standard input does, so that none outlives the tests.

#[cfg(unix)]
fn main() -> Result<(), Box<dyn std::error::Error>> {
    unix::main()
}

#[cfg(not(unix))]
fn main() {}

#[cfg(unix)]
mod unix {
    use std::error::Error;
    use std::fs::{File, OpenOptions};
    use std::io::{self, Write as _};
    use std::time::Duration;

    use leasehold::{CancellationToken, Lease, Locker, Options};

    /// How often the job shows that it is alive. Long beside the time that a test takes to react to a tick.
    const TICK: Duration = Duration::from_millis(50);

    /// How long the job winds down after it was told to stop: several retry intervals of the tests.
    const WIND_DOWN: Duration = Duration::from_millis(400);

    /// How many ticks a job that hands over leads for.
    const TERM_IN_TICKS: u32 = 2;

    #[derive(Clone, Copy, PartialEq, Eq)]
    enum Behaviour {
        /// Leads until it is told to stop.
        Hold,
        /// Does not stop, whatever it is told.
        Stubborn,
        /// As `Hold`, and takes its time to stop.
        WindDown,
        /// Steps down after a short term.
        HandOver,
    }

    #[tokio::main(flavor = "current_thread")]
    pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [url, name, options, log, behaviour] = arguments.as_slice() else {
            return Err(
                "usage: leasehold-replica URL NAME OPTIONS LOG hold|stubborn|wind-down|hand-over".into()
            );
        };
        let behaviour = match behaviour.as_str() {
            "hold" => Behaviour::Hold,
            "stubborn" => Behaviour::Stubborn,
            "wind-down" => Behaviour::WindDown,
            "hand-over" => Behaviour::HandOver,
            other => return Err(format!("there is no behaviour {other:?}").into()),
        };
        let log = OpenOptions::new().append(true).create(true).open(log)?;

        let shutdown = CancellationToken::new();
        let asked = shutdown.clone();
        std::thread::spawn(move || {
            io::copy(&mut io::stdin(), &mut io::sink()).ok();
            asked.cancel();
        });

        let locker = Locker::connect(url, options.parse::<Options>()?).await?;
        let who = locker.identity();
        let candidate = locker.candidate(name).until(shutdown);
        candidate.run(async |lease: Lease| job(&lease, who, &log, behaviour).await).await?;
        locker.close().await;
        Ok(())
    }

    async fn job(lease: &Lease, who: &str, log: &File, behaviour: Behaviour) -> io::Result<()> {
        let body = Body { who, term: lease.term(), log };
        body.write("start")?;
        let mut ticks = 0;
        let told = async {
            match behaviour {
                Behaviour::Stubborn => std::future::pending().await,
                _ => lease.cancelled().await,
            }
        };
        let mut told = std::pin::pin!(told);
        while tokio::time::timeout(TICK, &mut told).await.is_err() {
            body.write("tick")?;
            ticks += 1;
            if behaviour == Behaviour::HandOver && ticks == TERM_IN_TICKS {
                lease.step_down();
            }
        }
        if behaviour == Behaviour::WindDown {
            tokio::time::sleep(WIND_DOWN).await;
        }
        Ok(())
    }

    /// Writes `end` when the job's body is gone, however it went.
    struct Body<'a> {
        who: &'a str,
        term: u64,
        log: &'a File,
    }

    impl Body<'_> {
        fn write(&self, what: &str) -> io::Result<()> {
            // One write, so that lines of several processes do not mix.
            let mut log = self.log;
            log.write_all(format!("{} {what} {}\n", self.who, self.term).as_bytes())
        }
    }

    impl Drop for Body<'_> {
        fn drop(&mut self) {
            self.write("end").ok();
        }
    }
}
