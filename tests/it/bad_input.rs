//! Input that cannot be used: a typed error at once, that says what to change, and nothing left behind.

use std::convert::Infallible;
use std::fs;
use std::time::Duration;

use leasehold::{
    ConnectError, Error, Lease, Locker, MAX_NAME_BYTES, NameError, Options, OptionsError, RunError, UrlError,
};

use crate::support::{Log, Member, Stage, on_every_store, quick};

#[tokio::test]
async fn urls_that_cannot_be_used_are_refused_with_what_to_write() {
    for url in ["", "leases", "/var/lib/leases", "C:\\leases", "://x", "user:secret@host"] {
        let error = Locker::connect(url, quick("a")).await.unwrap_err();
        assert!(!error.to_string().contains("secret"), "{url}: {error}");
        assert!(error.to_string().contains("write file:/"), "{url}: {error}");
        match (url, &error) {
            // What stands before the colon may be a scheme here.
            ("user:secret@host", Error::Url(UrlError::UnknownScheme { scheme })) => {
                assert_eq!(scheme, "user");
            }
            (_, Error::Url(UrlError::NoScheme)) => {}
            _ => panic!("{url}: {error:?}"),
        }
    }
    for url in ["ftp://host/x", "https://app:secret@host/x"] {
        let error = Locker::connect(url, quick("a")).await.unwrap_err();
        assert!(matches!(error, Error::Url(UrlError::UnknownScheme { .. })), "{url}: {error:?}");
        assert!(!format!("{error} {error:?}").contains("secret"), "{error:?}");
        assert!(error.to_string().contains("write file:/"), "{url}: {error}");
    }
    for (url, expected) in [
        ("file:", UrlError::FilePath),
        ("file://", UrlError::FilePath),
        ("FILE:", UrlError::FilePath),
        ("file://host/leases", UrlError::FileHost),
    ] {
        let error = Locker::connect(url, quick("a")).await.unwrap_err();
        assert!(matches!(&error, Error::Url(it) if *it == expected), "{url}: {error:?}");
    }
}

#[test]
fn option_text_that_cannot_be_used_is_refused_with_what_would_do() {
    for (text, says) in [
        ("rety_interval=5s", "retry_interval"),
        ("retry_interval", "retry_interval"),
        ("retry_interval=5", "5s"),
        ("max_held=many", "whole number"),
        ("query_timeout=0s", "query_timeout"),
        ("identity=", "identity"),
    ] {
        let error = text.parse::<Options>().unwrap_err();
        assert!(error.to_string().contains(says), "{text}: {error}");
    }
}

/// F-02: before anything is made.
#[tokio::test]
async fn options_that_cannot_be_used_are_refused_before_anything_is_made() {
    let base = tempfile::tempdir().unwrap();
    let dir = base.path().join("leases");
    let bad = || quick("a").retry_interval(Duration::ZERO);
    let error = Locker::file(&dir, bad()).unwrap_err();
    assert!(matches!(error, Error::Options(OptionsError::TooShort { option: "retry_interval", .. })));
    let error = Locker::connect(&format!("file:{}", dir.display()), bad()).await.unwrap_err();
    assert!(matches!(error, Error::Options(OptionsError::TooShort { .. })), "{error:?}");
    let error = Locker::memory(&leasehold::Memory::new(), bad()).unwrap_err();
    assert!(error.to_string().contains("retry_interval"), "{error}");
    assert!(!dir.exists());
}

#[tokio::test]
async fn names_that_cannot_be_used_are_refused_at_once() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let long = "x".repeat(MAX_NAME_BYTES + 1);
        for (name, expected) in [("", NameError::Empty), (&long, NameError::TooLong { bytes: long.len() })] {
            let error = locker.run(name, async |_: Lease| Ok::<_, Infallible>(())).await.unwrap_err();
            assert!(matches!(&error, RunError::Name(it) if *it == expected), "{error:?}");
            let error = locker.step_down(name).await.unwrap_err();
            assert!(matches!(&error, Error::Name(it) if *it == expected), "{error:?}");
        }
        assert_eq!(stage.sessions(), 0);
        let longest = "x".repeat(MAX_NAME_BYTES);
        assert_eq!(locker.run(&longest, async |_: Lease| Ok::<_, Infallible>(1)).await.unwrap(), Some(1));
        locker.close().await;
    })
    .await;
}

#[tokio::test]
async fn a_directory_that_cannot_be_used_is_refused_and_nothing_is_made() {
    let base = tempfile::tempdir().unwrap();
    let file = base.path().join("file");
    fs::write(&file, "in the way").unwrap();
    for dir in [file.clone(), file.join("below"), file.join("further/below")] {
        for error in [
            Locker::file(&dir, quick("a")).unwrap_err(),
            Locker::connect(&format!("file:{}", dir.display()), quick("a")).await.unwrap_err(),
        ] {
            assert!(
                matches!(&error, Error::Connect(ConnectError::Directory { path, .. }) if *path == dir),
                "{error:?}"
            );
            assert!(error.to_string().contains("choose another"), "{error}");
        }
    }
    assert_eq!(fs::read_to_string(&file).unwrap(), "in the way");
    assert_eq!(fs::read_dir(base.path()).unwrap().count(), 1);
}

#[tokio::test]
async fn more_names_than_max_held_are_refused_until_one_has_ended() {
    on_every_store(async |stage| {
        let (log, locker) = (Log::default(), stage.locker(quick("a").max_held(2)));
        let mut one = Member::on(&locker, "one", "one", &log);
        let mut two = Member::on(&locker, "two", "two", &log);
        let (lease, other) = (one.leads().await, two.leads().await);
        let job = async |_: Lease| Ok::<_, Infallible>(3);
        let error = locker.run("three", job).await.unwrap_err();
        assert!(matches!(error, RunError::TooManyNames { max_held: 2 }), "{error:?}");
        assert!(error.to_string().contains("raise max_held"), "{error}");
        assert!(lease.check().await && other.check().await && stage.is_free("three"));
        one.stop().await.unwrap();
        assert_eq!(locker.run("three", job).await.unwrap(), Some(3));
        two.stop().await.unwrap();
    })
    .await;
}

/// A relative path is one of the working directory, and a missing directory is made.
#[tokio::test]
async fn a_missing_directory_is_made() {
    let stage = Stage::files();
    let dir = stage.dir().path().join("made/of late");
    let locker = Locker::connect(&format!("file:{}", dir.display()), quick("a")).await.unwrap();
    assert_eq!(locker.run("job", async |_: Lease| Ok::<_, Infallible>(1)).await.unwrap(), Some(1));
    locker.close().await;
    assert!(dir.is_dir());
}
