//! Guides: pages on what concerns more than one type. There is nothing in here but text.
//!
//! The pages lie in the repository's folder `docs`, where their links to tests and examples lead to files.

/// [every]: crate::Every
/// [fencing]: crate::guide::fencing
/// [moving]: crate::guide::moving
/// [overlap]: crate::guide::overlap
/// [several]: crate::guide::several
#[doc = include_str!("../docs/verbs.md")]
///
/// # See
///
/// [`Locker::run`](crate::Locker::run), [`Locker::every`](crate::Locker::every), [`Locker::lock`](crate::Locker::lock),
/// [`Locker::rw_lock`](crate::Locker::rw_lock), [`Scope`](crate::Scope), [`Kind`](crate::Kind).
#[cfg_attr(feature = "postgres", doc = "And [`xact_lock`](crate::postgres::xact_lock).")]
pub mod verbs {}

/// [fencing]: crate::guide::fencing
/// [several]: crate::guide::several
/// [token]: crate::guide::fencing#a-token
#[doc = include_str!("../docs/overlap.md")]
///
/// # See
///
/// [`Options::bounds`](crate::Options::bounds), [`Locker::bounds`](crate::Locker::bounds), [`Bounds`](crate::Bounds),
/// [`Options::takeover_delay`](crate::Options::takeover_delay), [`Locker::health`](crate::Locker::health),
/// [`Lease::cancellation`](crate::Lease::cancellation).
pub mod overlap {}

/// [overlap]: crate::guide::overlap
#[doc = include_str!("../docs/fencing.md")]
///
/// # See
///
/// [`Lease::fencing_token`](crate::Lease::fencing_token), [`FencingToken::admits`](crate::FencingToken::admits),
/// [`Lease::fence_sql`](crate::Lease::fence_sql), [`Fenced`](crate::Fenced), [`Lock::fenced`](crate::Lock::fenced),
/// [`RwLock::fenced`](crate::RwLock::fenced), [`Options::fence_limit`](crate::Options::fence_limit),
/// [`State::Blocked`](crate::State::Blocked).
#[cfg_attr(feature = "postgres", doc = "And [`Lease::fence`](crate::Lease::fence).")]
pub mod fencing {}

#[doc = include_str!("../docs/poolers.md")]
///
/// # See
///
/// [`diagnose`](crate::diagnose), [`Options::trust_affinity`](crate::Options::trust_affinity),
/// [`ConnectError::Pooler`](crate::ConnectError::Pooler).
#[cfg_attr(feature = "postgres", doc = "And [`xact_lock`](crate::postgres::xact_lock).")]
pub mod poolers {}

#[doc = include_str!("../docs/kubernetes.md")]
///
/// # See
///
/// [`Locker::health`](crate::Locker::health), [`Trouble`](crate::Trouble),
/// [`Options::drain_timeout`](crate::Options::drain_timeout), [`Options::stop_grace`](crate::Options::stop_grace).
pub mod kubernetes {}

/// [fencing]: crate::guide::fencing
/// [poolers]: crate::guide::poolers
#[cfg_attr(feature = "redis", doc = "[redis]: crate::redis")]
#[doc = include_str!("../docs/moving.md")]
///
/// # See
///
/// [`Name::key`](crate::Name::key), [`Name::key_pair`](crate::Name::key_pair), [`Name::autumn`](crate::Name::autumn),
/// [`Every`](crate::Every), [`Crashed`](crate::Crashed).
pub mod moving {}

/// [end]: crate::guide::operating#to-make-somebody-else-lead
/// [fencing]: crate::guide::fencing
#[doc = include_str!("../docs/testing.md")]
#[cfg_attr(feature = "testing", doc = "\n# See\n\n[`Memory`](crate::Memory).")]
pub mod testing {}

/// [fencing]: crate::guide::fencing
/// [kubernetes]: crate::guide::kubernetes
/// [metrics]: crate::guide::metrics
#[doc = include_str!("../docs/operating.md")]
///
/// # See
///
/// [`Observer`](crate::Observer), [`Locker::step_down`](crate::Locker::step_down), [`Key::of`](crate::Key::of),
/// [`Locker::close`](crate::Locker::close).
pub mod operating {}

#[doc = include_str!("../docs/metrics.md")]
/// ```yaml
#[doc = include_str!("../examples/prometheus/alerts.yml")]
/// ```
///
/// # See
///
/// [`Locker::health`](crate::Locker::health), for a probe; [`Observer`](crate::Observer), for who leads where.
pub mod metrics {}

/// [fencing]: crate::guide::fencing
#[doc = include_str!("../docs/several.md")]
///
/// # See
///
/// [`Locker::connect`](crate::Locker::connect), [`Scope`](crate::Scope),
/// [`Candidate::eligible`](crate::Candidate::eligible), [`Fenced::OtherDatabase`](crate::Fenced::OtherDatabase).
pub mod several {}

/// [undoes]: crate::guide::fencing#what-undoes-it
#[doc = include_str!("../docs/older_sqlx.md")]
///
/// # See
///
/// [`Lease::fence_sql`](crate::Lease::fence_sql), [`Locker::at`](crate::Locker::at), [`Key::of`](crate::Key::of).
pub mod older_sqlx {}

/// [verbs]: crate::guide::verbs
#[doc = include_str!("../docs/compared.md")]
pub mod compared {}
