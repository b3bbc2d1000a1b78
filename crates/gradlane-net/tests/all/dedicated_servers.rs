//! Ranks that only serve, over loopback: the mean is that of the ranks that train, in every dtype; a
//! server needs no call but the wait for the end, which comes by itself or names who is missing.

use crate::support::{
    check_means, contribute, deadline, each_rank, never, run_step, specs, tensor, world,
    world_with, TEST_TIMEOUT,
};
use gradlane_engine::{Plan, Roles, Strategy, TensorKind, TensorSpec, Update};
use gradlane_net::ChannelError;
use gradlane_units::{Dtype, Step};

fn plan(strategy: &str, roles: Roles) -> String {
    let buffer = TensorSpec { kind: TensorKind::Initial, ..tensor("running", 77, Dtype::U8) };
    let model = vec![
        tensor("first", 30_000, Dtype::F32),
        tensor("empty", 0, Dtype::F32),
        buffer,
        tensor("half", 12_345, Dtype::F16),
        tensor("double", 999, Dtype::F64),
    ];
    let strategy = Strategy::named(strategy, Some(1_000), 7).expect("a strategy");
    let plan = Plan::build_for(model, strategy, Update::Worker, roles).expect("a plan");
    serde_json::to_string(&plan).expect("JSON")
}

#[test]
fn the_mean_is_that_of_the_ranks_that_train() {
    for (strategy, workers, servers) in [("p3", 2, 3), ("wfbp", 3, 1), ("kvstore", 1, 2)] {
        let channels =
            world(workers + servers, &plan(strategy, Roles::dedicated(workers, servers)));
        each_rank(channels, move |channel| {
            let specs = specs(&channel);
            if channel.rank().0 >= workers {
                let refused = channel.finish(TEST_TIMEOUT, &mut deadline());
                refused.expect("an orderly end, after that of the ranks that train");
                let metrics = channel.metrics();
                let owned = metrics.peers[channel.rank().index()].owned_bytes;
                assert!(owned > 0 && metrics.gathered_slices > 0, "{metrics:?}");
                return;
            }
            for step in 0..4 {
                let tensors = run_step(&channel, step).expect("a step");
                check_means(workers, step, &specs, &tensors);
            }
            channel.finish(TEST_TIMEOUT, &mut never).expect("an orderly end");
            let served: Vec<u64> =
                channel.metrics().peers.iter().map(|it| it.owned_bytes).collect();
            assert!(served[..workers as usize].iter().all(|&bytes| bytes == 0), "{served:?}");
        });
    }
}

#[test]
fn a_server_that_gives_up_is_named_by_all() {
    let channels = world(3, &plan("p3", Roles::dedicated(2, 1)));
    each_rank(channels, |channel| {
        if channel.rank().0 == 2 {
            let step = channel.step_begin(Step(0));
            assert!(step.is_ok(), "it is refused by the engine, and raised with the next call");
            channel.abort("the machine is needed elsewhere");
            return;
        }
        let failed = (0..).find_map(|step| run_step(&channel, step).err());
        let text = failed.expect("an error").to_string();
        assert!(text.contains("rank 2 gave up: the machine is needed elsewhere"), "{text}");
    });
}

#[test]
fn who_holds_up_a_step_is_named_by_the_server_on_all_others() {
    let plan = plan("p3", Roles::dedicated(3, 1));
    // The others would say what they wait for, the server, only after a minute.
    let channels = world_with("127.0.0.1", 4, &plan, |options| {
        options.progress_timeout_s = if options.rank == 3 { 1.0 } else { 60.0 };
    });
    let errors = each_rank(channels, |channel| {
        if channel.rank().0 == 3 {
            return channel.finish(TEST_TIMEOUT, &mut deadline()).expect_err("nobody comes");
        }
        run_step(&channel, 0).expect("step 0");
        let kept = if channel.rank().0 == 1 {
            // It trains on, as far as anybody can see, and takes no part.
            Vec::new()
        } else {
            contribute(&channel, 1).expect("gradients")
        };
        let error = loop {
            if let Some(failure) = channel.failure() {
                break ChannelError::Failed(failure);
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        };
        channel.abort("over");
        drop(kept);
        error
    });
    for (rank, error) in errors.iter().enumerate() {
        let text = error.to_string();
        assert!(text.contains("waiting for rank 1"), "rank {rank}: {text}");
    }
}
