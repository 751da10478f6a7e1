//! A replica for the integration tests: a process that contends for one name, and writes what its job does to a log.
//!
//! `leasehold-replica URL NAME OPTIONS LOG BEHAVIOUR [BROKEN]`. The log's lines are `<identity> start|tick|end <term>`, each
//! appended in one write. It ends in order when its standard input does, so that none outlives the tests.

#[cfg(unix)]
mod server;
#[cfg(all(unix, feature = "postgres"))]
mod writer;

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
    use std::time::{Duration, Instant};

    use leasehold::{CancellationToken, Lease, Locker, Options, Sabotage};

    const USAGE: &str = "usage: leasehold-replica URL NAME OPTIONS LOG hold|stubborn|wind-down|hand-over|look|\
         lock|read|write|write-fenced|write-plain|once-fenced|once-plain|\
         serve|serve-stuck|serve-yearly-stuck|serve-yearly-again \
         [no-deadline|no-server-ttl|close-before-end|no-barrier|client-clock]";

    /// How often the job shows that it is alive. Long beside the time that a test takes to react to a tick.
    const TICK: Duration = Duration::from_millis(50);

    /// How long the job winds down after it was told to stop: several retry intervals of the tests.
    const WIND_DOWN: Duration = Duration::from_millis(400);

    /// How many ticks a job that hands over leads for.
    const TERM_IN_TICKS: u32 = 2;

    /// What no machine takes between two looks: the process was stopped.
    const STANDSTILL: Duration = Duration::from_secs(1);

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
        /// Blocks its thread, looks at the lease all the time, and says what it sees first after it stood still.
        Look,
    }

    #[tokio::main(flavor = "current_thread")]
    pub(crate) async fn main() -> Result<(), Box<dyn Error>> {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let [url, name, options, log, behaviour, broken @ ..] = arguments.as_slice() else {
            return Err(USAGE.into());
        };
        let options = sabotaged(options.parse()?, broken)?;
        let log = OpenOptions::new().append(true).create(true).open(log)?;

        let shutdown = CancellationToken::new();
        let asked = shutdown.clone();
        std::thread::spawn(move || {
            io::copy(&mut io::stdin(), &mut io::sink()).ok();
            asked.cancel();
        });

        let locker = locker(url, options).await?;
        #[cfg(feature = "postgres")]
        if let Some(writer) = crate::writer::Writer::of(behaviour, url, log.try_clone()?)? {
            return writer.run(locker, name, shutdown).await;
        }
        if matches!(behaviour.as_str(), "lock" | "read" | "write") {
            return section(locker, name, behaviour, &log, shutdown).await;
        }
        if let Some(server) = crate::server::Server::of(behaviour) {
            return server.run(locker, name, shutdown, log).await;
        }
        let behaviour = match behaviour.as_str() {
            "hold" => Behaviour::Hold,
            "stubborn" => Behaviour::Stubborn,
            "wind-down" => Behaviour::WindDown,
            "hand-over" => Behaviour::HandOver,
            "look" => Behaviour::Look,
            _ => return Err(USAGE.into()),
        };
        let who = locker.identity();
        let candidate = locker.candidate(name).until(shutdown);
        candidate.run(async |lease: Lease| job(&lease, who, &log, behaviour).await).await?;
        locker.close().await;
        Ok(())
    }

    /// Holds a lock, or reads or writes, until it is told to stop.
    async fn section(
        locker: Locker,
        name: &str,
        how: &str,
        log: &File,
        shutdown: CancellationToken,
    ) -> Result<(), Box<dyn Error>> {
        let who = locker.identity();
        let body =
            async |lease: Lease| Ok::<_, Box<dyn Error>>(job(&lease, who, log, Behaviour::Hold).await?);
        let entered = async {
            match how {
                "lock" => locker.lock(name).with(body).await,
                "read" => locker.rw_lock(name).with_read(body).await,
                _ => locker.rw_lock(name).with_write(body).await,
            }
        };
        shutdown.run_until_cancelled(entered).await.transpose()?;
        locker.close().await;
        Ok(())
    }

    fn sabotaged(options: Options, broken: &[String]) -> Result<Options, Box<dyn Error>> {
        let way = match broken {
            [] => return Ok(options),
            [way] => way.as_str(),
            _ => return Err(USAGE.into()),
        };
        Ok(options.sabotage(match way {
            "no-deadline" => Sabotage::NoDeadline,
            "no-server-ttl" => Sabotage::NoServerTtl,
            "close-before-end" => Sabotage::CloseBeforeEnd,
            "no-barrier" => Sabotage::NoBarrier,
            "client-clock" => Sabotage::ClientClock,
            _ => return Err(USAGE.into()),
        }))
    }

    /// A Locker that is not yet connected, where that can be had: the run connects, and waits for a server that is busy.
    async fn locker(url: &str, options: Options) -> Result<Locker, Box<dyn Error>> {
        #[cfg(feature = "postgres")]
        if url.starts_with("postgres") {
            return Ok(Locker::postgres(url.parse::<sqlx::postgres::PgConnectOptions>()?, options)?);
        }
        Ok(Locker::connect(url, options).await?)
    }

    async fn job(lease: &Lease, who: &str, log: &File, behaviour: Behaviour) -> io::Result<()> {
        let body = Body { who, term: lease.term(), log };
        body.write("start")?;
        if behaviour == Behaviour::Look {
            return look(lease, &body);
        }
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

    /// Writes `held` or `over` where the process was stopped between two looks; in the middle of one, it tells nothing.
    fn look(lease: &Lease, body: &Body<'_>) -> io::Result<()> {
        let mut last = now();
        while !lease.cancellation().is_cancelled() {
            std::thread::sleep(Duration::from_millis(1));
            let looks = now();
            let is_held = lease.is_held();
            if looks - last > STANDSTILL {
                body.write(if is_held { "held" } else { "over" })?;
            }
            last = now();
        }
        Ok(())
    }

    fn now() -> Instant {
        #[expect(clippy::disallowed_methods, reason = "the process's own watch")]
        Instant::now()
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
