//! One frame there and back, for `scripts/frame-path`, which lists the files that it passes.

use crate::support::{deadline, gradient, never, plan, specs, tensor, world_with, TEST_TIMEOUT};
use gradlane_units::{Dtype, Step, TensorId};
use std::io::stdin;

/// Waits for whoever traces this process, once they were told.
fn pause(text: &str) {
    println!("{text} {}", std::process::id());
    stdin().read_line(&mut String::new()).expect("a line");
}

/// A tensor of one slice is pushed from rank 0 to rank 1, reduced there and broadcast back.
#[test]
#[ignore = "waits for a tracer"]
fn a_frame_there_and_back() {
    // The second slice is rank 1's. It fills one frame, and a job thread reduces it.
    let tensors = vec![tensor("of rank 0", 10_000, Dtype::F32), tensor("w", 10_000, Dtype::F32)];
    let channels = world_with("127.0.0.1", 2, &plan(tensors, "p3", 10_000, 2), |options| {
        options.lanes = 1;
    });
    for step in (0..3).map(Step) {
        let mut memory: Vec<_> = channels
            .iter()
            .map(|channel| {
                let specs = specs(channel).into_iter().enumerate();
                let rank = channel.rank().0;
                specs.map(|(at, spec)| gradient(rank, step.0, at, &spec)).collect::<Vec<_>>()
            })
            .collect();
        let mut submit = |rank: usize, tensor: u32| {
            let memory = memory[rank][tensor as usize].memory();
            channels[rank].gradient_ready(TensorId(tensor), step, memory).expect("a submission");
        };
        for channel in &channels {
            channel.step_begin(step).expect("a step");
        }
        submit(0, 0);
        submit(1, 0);
        for channel in &channels {
            channel.wait(&[TensorId(0)], step, &mut deadline()).expect("a result");
        }
        submit(1, 1);
        if step == Step(2) {
            std::thread::sleep(std::time::Duration::from_millis(200));
            pause("begin");
        }
        submit(0, 1);
        channels[0].wait(&[TensorId(1)], step, &mut deadline()).expect("a result");
        if step == Step(2) {
            pause("end");
        }
        for channel in &channels {
            channel.wait_step(step, &mut deadline()).expect("a whole step");
        }
    }
    let threads = channels.into_iter().map(|channel| {
        std::thread::spawn(move || channel.finish(TEST_TIMEOUT, &mut never).expect("an end"))
    });
    threads.collect::<Vec<_>>().into_iter().for_each(|it| it.join().expect("a thread"));
}
