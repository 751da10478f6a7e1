//! The shapes in which the API is used: that these compile is most of the test.

use std::convert::Infallible;
use std::rc::Rc;

use leasehold::{Candidate, Lease, Locker, Options, RunError};

use crate::support::{Stage, on_every_store, quick};

/// An error type of the user's own.
#[derive(Debug, thiserror::Error)]
#[error("no money")]
struct MyError;

async fn named(lease: Lease) -> Result<u64, MyError> {
    lease.check().await;
    if lease.name().as_str() == "broke" { Err(MyError) } else { Ok(lease.term()) }
}

const fn assert_shared<T: Send + Sync + Clone + 'static>() {}
const fn assert_send<T: Send + 'static>() {}

#[test]
fn handles_can_be_shared_between_threads() {
    assert_shared::<Locker>();
    assert_shared::<Lease>();
    assert_send::<Candidate>();
    assert_shared::<Options>();
}

#[tokio::test]
async fn a_named_function_is_a_job_and_its_error_comes_back() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        assert_eq!(locker.run("job", named).await.unwrap(), Some(1));
        let error = locker.candidate(String::from("broke")).run(named).await.unwrap_err();
        assert_eq!(error.to_string(), "the job failed: no money");
        assert!(matches!(error.into_job(), Some(MyError)));
    })
    .await;
}

#[tokio::test]
async fn the_deadline_is_told_when_it_moves_on() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let job = async |lease: Lease| {
            let mut known = lease.deadline();
            for _ in 0..3 {
                let later = lease.deadline_after(known).await;
                assert!(later > known && lease.deadline() >= later);
                known = later;
            }
            Ok::<_, Infallible>(())
        };
        assert_eq!(locker.run("job", job).await.unwrap(), Some(()));
    })
    .await;
}

#[tokio::test]
async fn a_run_can_be_spawned() {
    let stage = Stage::files();
    let locker = stage.locker(quick("a"));
    let of_task = locker.clone();
    let run = tokio::spawn(async move {
        of_task
            .run("job", async |lease: Lease| {
                tokio::task::yield_now().await;
                Ok::<_, Infallible>(lease.term())
            })
            .await
    });
    assert_eq!(run.await.unwrap().unwrap(), Some(1));
    assert_eq!(tokio::spawn(locker.candidate("job").run(named)).await.unwrap().unwrap(), Some(2));
}

#[tokio::test]
async fn a_question_mark_works_with_anyhow() -> anyhow::Result<()> {
    let stage = Stage::files();
    let locker = Locker::connect(&stage.url(), quick("a")).await?;
    assert_eq!(locker.run("job", named).await?, Some(1));
    let of_anyhow = locker.run("job", async |_: Lease| anyhow::Ok("fine")).await?;
    assert_eq!(of_anyhow, Some("fine"));

    let fails = async |locker: &Locker| -> anyhow::Result<()> {
        locker.run("job", async |_: Lease| Err::<(), _>(anyhow::anyhow!("no money"))).await?;
        Ok(())
    };
    let error = fails(&locker).await.unwrap_err();
    assert!(error.downcast_ref::<RunError<anyhow::Error>>().is_some());
    assert_eq!(error.to_string(), "the job failed: no money");
    locker.close().await;
    Ok(())
}

#[tokio::test]
async fn a_job_may_borrow_and_change_what_is_around_it() {
    on_every_store(async |stage| {
        let locker = stage.locker(quick("a"));
        let (words, mut calls) = (vec![String::from("borrowed")], 0);
        let borrowed = locker.run("job", async |lease: Lease| {
            lease.check().await;
            Ok::<_, MyError>(words[0].as_str())
        });
        assert_eq!(borrowed.await.unwrap(), Some("borrowed"));
        let counted = locker.run("job", |_: Lease| {
            calls += 1;
            std::future::ready(Ok::<_, MyError>(calls))
        });
        assert_eq!(counted.await.unwrap(), Some(1));
        assert_eq!(words.len(), calls);
    })
    .await;
}

#[tokio::test]
async fn a_job_need_not_be_send() {
    let stage = Stage::files();
    let locker = stage.locker(quick("a"));
    let local = tokio::task::LocalSet::new();
    let outcome = local.run_until(async {
        let run = tokio::task::spawn_local(async move {
            let job = async |lease: Lease| {
                let term = Rc::new(lease.term());
                tokio::task::yield_now().await;
                Ok::<_, MyError>(*term)
            };
            locker.run("job", job).await
        });
        run.await.unwrap()
    });
    assert_eq!(outcome.await.unwrap(), Some(1));
}
