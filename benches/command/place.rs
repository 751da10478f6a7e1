//! The stores: a directory and a server of the bench's own.

use std::time::Duration;

use anyhow::ensure;
use leasehold::{Observer, Options};
use sqlx::postgres::PgConnectOptions;
use tempfile::TempDir;

use crate::process::now;
use crate::support::postgres::Cluster;

/// What is led, in all of them.
pub(crate) const NAME: &str = "bench";

/// Longest wait for a standby.
const LIMIT: Duration = Duration::from_secs(20);

pub(crate) struct Place {
    pub(crate) label: &'static str,
    url: String,
    backing: Backing,
}

enum Backing {
    Directory(#[expect(dead_code, reason = "dropped at the end")] TempDir),
    Server(Box<Cluster>),
}

impl Place {
    pub(crate) fn directory() -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let url = format!("file:{}", folder.path().join("leases").display());
        Ok(Self { label: "files", url, backing: Backing::Directory(folder) })
    }

    pub(crate) fn server() -> Self {
        let server = Cluster::new();
        let url = server.url("postgres", "", "postgres");
        Self { label: "PostgreSQL", url, backing: Backing::Server(Box::new(server)) }
    }

    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// For plain SQL, where there is a server.
    pub(crate) fn sql(&self) -> Option<PgConnectOptions> {
        match &self.backing {
            Backing::Directory(_) => None,
            Backing::Server(server) => Some(server.options()),
        }
    }

    /// Waits until one stands by.
    pub(crate) fn has_standby(&self) -> anyhow::Result<()> {
        runtime()?.block_on(async {
            let observer = Observer::connect(&self.url, Options::default()).await?;
            let since = now();
            while observer.standbys(NAME).await?.is_empty() {
                ensure!(now().saturating_sub(since) < LIMIT, "nobody stands by on {}", self.label);
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            observer.close().await;
            Ok(())
        })
    }
}

pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()
}
