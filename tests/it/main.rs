//! The contract against the stores, on the real clock: a module for each promise.
//!
//! The tests of one promise run on every store: see [`support::on_every_store`]. Order is shown by cause, from what the
//! jobs' own bodies log; nothing waits but [`support::eventually`].

// Everything here is test code, which may unwrap; clippy knows only the functions with #[test] for such.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod api;
mod bad_input;
#[cfg(target_os = "linux")]
mod bench_script;
mod blocking;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
mod command_children;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
mod command_examples;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
mod command_guard;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
mod command_lock;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
mod command_once;
#[cfg(all(unix, feature = "cli", feature = "postgres"))]
mod command_run;
#[cfg(all(unix, feature = "cli", feature = "postgres"))]
mod command_status;
#[cfg(all(target_os = "linux", feature = "cli", feature = "postgres"))]
mod command_terminal;
#[cfg(all(unix, feature = "cli", feature = "postgres"))]
mod doctor;
mod endings;
mod every;
#[cfg(all(target_os = "linux", feature = "postgres"))]
mod every_postgres;
#[cfg(all(unix, feature = "postgres"))]
mod fence_frozen;
#[cfg(all(target_os = "linux", feature = "postgres"))]
mod fence_halted;
#[cfg(all(unix, feature = "postgres"))]
mod fence_hammer;
mod fence_model;
#[cfg(all(unix, feature = "postgres"))]
mod fence_terms;
#[cfg(all(unix, feature = "postgres"))]
mod fencing;
#[cfg(all(target_os = "linux", feature = "postgres"))]
mod fencing_examples;
mod figures;
mod guides;
mod handover;
mod health;
mod leaving;
mod locks;
mod loss;
#[cfg(feature = "metrics")]
mod metrics;
mod names;
mod observer;
mod one_leader;
#[cfg(all(unix, feature = "postgres"))]
mod partitions;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_connecting;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_facts;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_faults;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_hosts;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_kit;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_locks;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_poolers;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_refusals;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_session;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_settings;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_store;
#[cfg(all(unix, feature = "postgres"))]
mod postgres_xact;
#[cfg(unix)]
mod processes;
#[cfg(all(unix, feature = "redis"))]
mod redis_facts;
#[cfg(all(unix, feature = "redis"))]
mod redis_faults;
#[cfg(all(unix, feature = "redis"))]
mod redis_kit;
#[cfg(all(unix, feature = "redis"))]
mod redis_leftovers;
#[cfg(all(unix, feature = "redis"))]
mod redis_readers;
#[cfg(all(unix, feature = "redis"))]
mod redis_refusals;
#[cfg(all(unix, feature = "redis"))]
mod redis_store;
mod rw_locks;
mod support;
mod telemetry;
mod timing;
mod tokens;
