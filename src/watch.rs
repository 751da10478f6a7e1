//! Watching what a candidate is doing: [`StateWatch`].

use tokio::sync::watch;

use crate::driver::term::{Shown, State};

/// Watches what the candidate of one name is doing: from [`Locker::subscribe`](crate::Locker::subscribe).
///
/// It gives copies. A guard of a `tokio::sync::watch` would keep the driver waiting for as long as somebody holds it, and
/// cost the leases of every job on the Locker.
#[derive(Clone, Debug)]
pub struct StateWatch(watch::Receiver<Shown>);

impl StateWatch {
    pub(crate) const fn new(states: watch::Receiver<Shown>) -> Self {
        Self(states)
    }

    /// Gives the present state.
    #[must_use]
    pub fn get(&self) -> State {
        self.0.borrow().state
    }

    /// Waits for a state that this watch has not given yet, and gives it; states that follow each other quickly may be
    /// skipped. `None` when the Locker is gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe.
    pub async fn changed(&mut self) -> Option<State> {
        self.0.changed().await.ok()?;
        Some(self.0.borrow_and_update().state)
    }

    /// Waits until the state is one that `is_wanted` says yes to, the present one included, and gives it. `None` when
    /// the Locker is gone.
    ///
    /// # Cancel safety
    ///
    /// Cancel-safe.
    ///
    /// # Examples
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")] async fn main() -> anyhow::Result<()> {
    /// # let dir = tempfile::tempdir()?;
    /// use leasehold::{Lease, Locker, Options, State};
    ///
    /// let locker = Locker::file(dir.path(), Options::default())?;
    /// let mut watch = locker.subscribe("sweeper");
    /// assert_eq!(watch.get(), State::Ended);
    /// let run = locker.run("sweeper", async |lease: Lease| {
    ///     lease.cancelled().await;
    ///     anyhow::Ok(())
    /// });
    /// tokio::select! {
    ///     _ = run => unreachable!("nobody told it to stop"),
    ///     state = watch.wait_for(|state| matches!(state, State::Leading { .. })) => println!("{state:?}"),
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn wait_for(&mut self, mut is_wanted: impl FnMut(State) -> bool) -> Option<State> {
        let mut state = self.0.borrow_and_update().state;
        while !is_wanted(state) {
            state = self.changed().await?;
        }
        Some(state)
    }
}
