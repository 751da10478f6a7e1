//! Guides: pages on what concerns more than one type. There is nothing in here but text.

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

#[doc = include_str!("../docs/metrics.md")]
/// ```yaml
#[doc = include_str!("../examples/prometheus/alerts.yml")]
/// ```
///
/// # See
///
/// [`Locker::health`](crate::Locker::health), for a probe; [`Observer`](crate::Observer), for who leads where.
pub mod metrics {}
