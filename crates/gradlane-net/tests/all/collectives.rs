//! Groups of ranks over loopback sockets: every operation, mistakes, losses, sealing.

use gradlane_net::{
    Call, Element, Group, GroupError, GroupErrorKind, GroupOptions, Listener, Operation, Reduction,
    UserMemory, Work,
};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(60);

/// Connects `size` ranks and runs `program` on a thread for each.
fn run<T: Send + 'static>(
    size: u32,
    secret: &'static [u8],
    program: impl Fn(u32, Group) -> T + Send + Sync + 'static,
) -> Vec<T> {
    let listeners: Vec<Listener> =
        (0..size).map(|_| Listener::bind("127.0.0.1", 0..=0).expect("a listener")).collect();
    let peers: Vec<String> = listeners.iter().map(|it| it.address().to_string()).collect();
    let program = Arc::new(program);
    let start = |(rank, listener): (usize, Listener)| {
        let (peers, program) = (peers.clone(), Arc::clone(&program));
        thread::spawn(move || {
            let options = GroupOptions {
                name: "test".to_owned(),
                job: "job".to_owned(),
                rank: rank as u32,
                size,
                generation: 0,
                seal: !secret.is_empty(),
                connect_timeout: LONG,
                silence_timeout: LONG,
                spin: Duration::ZERO,
            };
            let group = Group::connect(listener, &options, &peers, secret, &mut || false);
            program(rank as u32, group.expect("a group"))
        })
    };
    let threads: Vec<_> = listeners.into_iter().enumerate().map(start).collect();
    threads.into_iter().map(|it| it.join().expect("a rank")).collect()
}

fn memory(values: &mut [i32]) -> UserMemory {
    // SAFETY: the tests keep the values, and wait before they read them.
    unsafe { UserMemory::new(values.as_mut_ptr() as usize, size_of_val(values)) }
}

fn call(operation: Operation, inputs: Vec<UserMemory>, outputs: Vec<UserMemory>) -> Call {
    let (element, reduction) = (Element::I32, Reduction::Sum);
    Call { operation, element, reduction, root: 1, inputs, outputs }
}

fn begin_and_wait(group: &Group, call: &Call, timeout: Duration) -> Result<u32, GroupError> {
    let work = group.begin(call, Some(timeout), true)?;
    group.wait(&work, None, &mut || false)
}

/// Value `index` of `rank`.
fn value(rank: u32, index: usize) -> i32 {
    (rank as i32 + 1) * 1000 + (index % 997) as i32
}

fn values(rank: u32, length: usize) -> Vec<i32> {
    (0..length).map(|index| value(rank, index)).collect()
}

/// Calls each operation with `length` elements and compares the results with their definitions.
fn check_all_operations(rank: u32, size: u32, group: &Group, length: usize) {
    use Operation::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, Gather, MonitoredBarrier, Reduce,
        ReduceScatter, Scatter,
    };
    let run = |call: &Call| {
        begin_and_wait(group, call, LONG).expect("a result");
    };
    let sum: Vec<i32> = (0..length).map(|it| (0..size).map(|rank| value(rank, it)).sum()).collect();
    let own = values(rank, length);

    let mut reduced = own.clone();
    run(&call(AllReduce, vec![], vec![memory(&mut reduced)]));
    assert_eq!(reduced, sum);

    let mut at_root = own.clone();
    run(&call(Reduce, vec![], vec![memory(&mut at_root)]));
    assert_eq!(at_root, *if rank == 1 { &sum } else { &own });

    let mut given = own.clone();
    run(&call(Broadcast, vec![], vec![memory(&mut given)]));
    assert_eq!(given, values(1, length));

    let mut input = own.clone();
    let mut all = vec![vec![0; length]; size as usize];
    let outputs = all.iter_mut().map(|it| memory(it)).collect();
    run(&call(AllGather, vec![memory(&mut input)], outputs));
    let everything: Vec<Vec<i32>> = (0..size).map(|it| values(it, length)).collect();
    assert_eq!(all, everything);

    let mut gathered = vec![vec![0; length]; if rank == 1 { size as usize } else { 0 }];
    let outputs = gathered.iter_mut().map(|it| memory(it)).collect();
    run(&call(Gather, vec![memory(&mut input)], outputs));
    assert_eq!(gathered, everything[..gathered.len()]);

    let mut scattered = everything.clone();
    let inputs = match rank {
        1 => scattered.iter_mut().map(|it| memory(it)).collect(),
        _ => Vec::new(),
    };
    let mut output = vec![0; length];
    run(&call(Scatter, inputs, vec![memory(&mut output)]));
    assert_eq!(output, own);

    // Everybody's tensor for rank `r` is that of rank `r`.
    let mut for_each = everything;
    let inputs: Vec<UserMemory> = for_each.iter_mut().map(|it| memory(it)).collect();
    run(&call(ReduceScatter, inputs.clone(), vec![memory(&mut output)]));
    assert_eq!(output, own.iter().map(|it| it * size as i32).collect::<Vec<i32>>());

    let mut received = vec![vec![0; length]; size as usize];
    let outputs = received.iter_mut().map(|it| memory(it)).collect();
    run(&call(AllToAll, inputs, outputs));
    assert!(received.iter().all(|it| *it == own));

    run(&call(Barrier, vec![], vec![]));
    run(&call(MonitoredBarrier, vec![], vec![]));
}

#[test]
fn each_operation_gives_the_values_of_its_definition() {
    for size in 2..=5 {
        run(size, b"", move |rank, group| {
            for length in [0, 1, 5, 3_000, 40_000, 150_001] {
                check_all_operations(rank, size, &group, length);
            }
        });
    }
}

#[test]
fn sealed_groups_give_the_same_values() {
    run(3, b"a secret of some length", |rank, group| {
        for length in [1, 40_000] {
            check_all_operations(rank, 3, &group, length);
        }
    });
}

#[test]
fn calls_overlap_and_end_in_any_order() {
    run(3, b"", |rank, group| {
        let mut tensors: Vec<Vec<i32>> =
            (0..40).map(|it| values(rank, if it % 3 == 0 { 100_000 } else { 10 + it })).collect();
        let works: Vec<_> = tensors
            .iter_mut()
            .map(|it| {
                let call = call(Operation::AllReduce, vec![], vec![memory(it)]);
                group.begin(&call, Some(LONG), false).expect("begun")
            })
            .collect();
        works.iter().rev().for_each(|it| assert!(group.wait(it, None, &mut || false).is_ok()));
        for tensor in &tensors {
            let sum = |index| (0..3).map(|rank| value(rank, index)).sum::<i32>();
            assert!(tensor.iter().enumerate().all(|(index, it)| *it == sum(index)));
        }
    });
}

#[test]
fn messages_meet_receives_by_rank_and_tag() {
    run(3, b"", |rank, group| {
        let wait = |work: Arc<Work>| group.wait(&work, None, &mut || false).expect("a result");
        let message = |operation, peer, tag, it: &mut [i32]| {
            let memory = memory(it);
            group.begin_message(operation, peer, tag, memory, Some(LONG)).expect("begun")
        };
        for length in [0, 3, 100_000] {
            if rank == 0 {
                // Tags in another order than they were sent in, and from whom it may be.
                let (mut second, mut first) = (vec![0; length], vec![0; length]);
                wait(message(Operation::Receive, Some(1), 8, &mut second));
                wait(message(Operation::Receive, Some(1), 7, &mut first));
                assert_eq!((first, second), (values(7, length), values(8, length)));
                let (mut one, mut other) = (vec![0; length], vec![0; length]);
                let from = wait(message(Operation::Receive, None, 9, &mut one));
                let rest = wait(message(Operation::Receive, None, 9, &mut other));
                assert_eq!(from + rest, 3);
                assert_eq!((one, other), (values(from, length), values(rest, length)));
            } else {
                let (mut first, mut second) = (values(7, length), values(8, length));
                if rank == 1 {
                    let first = message(Operation::Send, Some(0), 7, &mut first);
                    let second = message(Operation::Send, Some(0), 8, &mut second);
                    wait(first);
                    wait(second);
                }
                let mut own = values(rank, length);
                wait(message(Operation::Send, Some(0), 9, &mut own));
            }
            begin_and_wait(&group, &call(Operation::Barrier, vec![], vec![]), LONG).expect("all");
        }
    });
}

#[test]
fn messages_that_nobody_receives_wait_with_their_sender() {
    let looked = Arc::new(std::sync::Barrier::new(2));
    run(2, b"", move |rank, group| {
        const COUNT: usize = 300;
        const LENGTH: usize = 16_000;
        let mut tensors: Vec<Vec<i32>> = (0..COUNT).map(|it| values(it as u32, LENGTH)).collect();
        if rank == 0 {
            let works: Vec<_> = tensors
                .iter_mut()
                .map(|it| {
                    let memory = memory(it);
                    group.begin_message(Operation::Send, Some(1), 0, memory, Some(LONG))
                })
                .map(|it| it.expect("begun"))
                .collect();
            let done = works.iter().filter(|it| it.is_done()).count();
            looked.wait();
            assert!(done < COUNT, "the bytes under way are bounded");
            works.iter().for_each(|it| assert!(group.wait(it, None, &mut || false).is_ok()));
        } else {
            looked.wait();
            for tensor in &tensors {
                let mut got = vec![0; LENGTH];
                let memory = memory(&mut got);
                let work = group.begin_message(Operation::Receive, Some(0), 0, memory, Some(LONG));
                group.wait(&work.expect("begun"), None, &mut || false).expect("a message");
                assert_eq!(got, *tensor);
            }
        }
    });
}

#[test]
fn messages_of_another_size_end_both_ranks() {
    for (first_ms, second_ms) in [(0, 100), (100, 0)] {
        let begun = Instant::now();
        run(2, b"", move |rank, group| {
            thread::sleep(Duration::from_millis([first_ms, second_ms][rank as usize]));
            let mut tensor = values(rank, if rank == 0 { 4 } else { 5 });
            let operation = if rank == 0 { Operation::Send } else { Operation::Receive };
            let memory = memory(&mut tensor);
            let work = group.begin_message(operation, Some(1 - rank), 0, memory, Some(LONG));
            let ended = work.and_then(|it| group.wait(&it, None, &mut || false));
            if rank == 1 {
                let error = ended.expect_err("another size").to_string();
                assert!(error.contains("16 bytes") && error.contains("20"), "{error}");
            }
            let call = call(Operation::Barrier, vec![], vec![]);
            let work = group.begin(&call, Some(LONG), false);
            let after = work.and_then(|it| group.wait(&it, None, &mut || false));
            assert!(after.is_err(), "the group has ended");
        });
        assert!(begun.elapsed() < LONG);
    }
}

#[test]
fn another_call_on_another_rank_is_named_on_both() {
    let calls: [(Operation, Operation); 3] = [
        (Operation::AllReduce, Operation::Broadcast),
        (Operation::Barrier, Operation::AllReduce),
        (Operation::Broadcast, Operation::Reduce),
    ];
    for (first, second) in calls {
        let begun = Instant::now();
        let errors = run(2, b"", move |rank, group| {
            let operation = if rank == 0 { first } else { second };
            let mut tensor = values(rank, 4);
            let outputs = match operation {
                Operation::Barrier => vec![],
                _ => vec![memory(&mut tensor)],
            };
            // Both may be done with their own part before they hear of it: the next call tells.
            let outcome = begin_and_wait(&group, &call(operation, vec![], outputs), LONG);
            let barrier = call(Operation::Barrier, vec![], vec![]);
            let next = |_| begin_and_wait(&group, &barrier, LONG);
            outcome.and_then(next).expect_err("different calls")
        });
        for error in &errors {
            let text = error.to_string();
            assert!(text.contains(first.name()) && text.contains(second.name()), "{text}");
        }
        assert!(errors.iter().any(|it| it.kind == GroupErrorKind::Mismatch), "{errors:?}");
        assert!(begun.elapsed() < LONG, "no time-out");
    }
}

#[test]
fn other_sizes_are_named() {
    let errors = run(3, b"", |rank, group| {
        let mut tensor = values(rank, if rank == 2 { 5 } else { 4 });
        let outputs = vec![memory(&mut tensor)];
        begin_and_wait(&group, &call(Operation::AllReduce, vec![], outputs), LONG)
            .expect_err("different sizes")
            .to_string()
    });
    assert!(
        errors.iter().all(|it| it.contains("of 4 i32") && it.contains("of 5 i32")),
        "{errors:?}"
    );
    // In one piece, and in several for one of the two alone, which may have sent them all by then.
    for elements in [6, 60_000] {
        let errors = run(2, b"", move |rank, group| {
            let (mut inputs, mut outputs) = (vec![vec![0; 4]; 2], vec![vec![0; 4]; 2]);
            if rank == 0 {
                inputs[1] = vec![0; elements];
            }
            let inputs = inputs.iter_mut().map(|it| memory(it)).collect();
            let outputs = outputs.iter_mut().map(|it| memory(it)).collect();
            let outcome = begin_and_wait(&group, &call(Operation::AllToAll, inputs, outputs), LONG);
            let barrier = call(Operation::Barrier, vec![], vec![]);
            let next = |_| begin_and_wait(&group, &barrier, LONG);
            outcome.and_then(next).expect_err("different sizes").to_string()
        });
        let sizes = format!("{} bytes where 16", 4 * elements);
        assert!(errors.iter().all(|it| it.contains(&sizes)), "{errors:?}");
    }
}

#[test]
fn ranks_that_do_not_come_are_named_in_time() {
    let errors = run(4, b"", |rank, group| {
        if rank >= 2 {
            // They are there, and busy with something else.
            thread::sleep(Duration::from_millis(1500));
            return None;
        }
        let mut tensor = values(rank, 4);
        let reduce = call(Operation::AllReduce, vec![], vec![memory(&mut tensor)]);
        let error = begin_and_wait(&group, &reduce, Duration::from_millis(900));
        Some(error.expect_err("two ranks are missing"))
    });
    let errors: Vec<GroupError> = errors.into_iter().flatten().collect();
    let named = errors.iter().filter(|it| it.to_string().contains("ranks 2, 3 did not begin it"));
    assert!(named.count() >= 1, "{errors:?}");
    assert!(errors.iter().any(|it| it.kind == GroupErrorKind::TimedOut && it.ranks == [2, 3]));
}

#[test]
fn a_rank_that_leaves_is_named_by_those_that_need_it() {
    let errors = run(3, b"", |rank, group| {
        if rank == 1 {
            group.close();
            group.join();
            return None;
        }
        let mut tensor = values(rank, 4);
        let reduce = call(Operation::AllReduce, vec![], vec![memory(&mut tensor)]);
        Some(begin_and_wait(&group, &reduce, LONG).expect_err("a rank has left"))
    });
    for error in errors.into_iter().flatten() {
        assert_eq!(error.kind, GroupErrorKind::Lost, "{error}");
        assert!(error.to_string().contains("rank 1, which has left the group"), "{error}");
    }
}

#[test]
fn what_was_sent_before_a_rank_leaves_arrives() {
    run(2, b"", |rank, group| {
        let mut tensor = values(1, 100_000);
        if rank == 0 {
            thread::sleep(Duration::from_millis(100));
            tensor.fill(0);
        }
        let broadcast = call(Operation::Broadcast, vec![], vec![memory(&mut tensor)]);
        begin_and_wait(&group, &broadcast, LONG).expect("a value");
        assert_eq!(tensor, values(1, 100_000));
    });
}

#[test]
fn mistakes_are_refused_and_the_group_goes_on() {
    run(2, b"", |rank, group| {
        let mut tensor = values(rank, 4);
        let mut wrong = call(Operation::AllReduce, vec![], vec![memory(&mut tensor)]);
        wrong.reduction = Reduction::Mean;
        let error = group.begin(&wrong, Some(LONG), true).expect_err("a mean of integers");
        assert_eq!(error.kind, GroupErrorKind::Argument);
        wrong.operation = Operation::Broadcast;
        wrong.root = 2;
        assert!(group.begin(&wrong, Some(LONG), true).is_err(), "no such root");
        let own = group.begin_message(Operation::Send, Some(rank), 0, memory(&mut tensor), None);
        assert!(own.is_err(), "a message to itself");
        check_all_operations(rank, 2, &group, 4);
    });
}

#[test]
fn watched_works_are_reported_without_a_waiting_thread() {
    run(2, b"", |rank, group| {
        let mut tensor = values(rank, 100_000);
        let reduce = call(Operation::AllReduce, vec![], vec![memory(&mut tensor)]);
        let work = group.begin(&reduce, Some(LONG), false).expect("begun");
        group.watch(&work);
        let ended = group.next_ended(Duration::ZERO).expect("an open group");
        assert!(Arc::ptr_eq(&ended, &work));
        assert_eq!(tensor[0], value(0, 0) + value(1, 0));
        begin_and_wait(&group, &call(Operation::Barrier, vec![], vec![]), LONG).expect("both");
        group.close();
        assert!(group.next_ended(Duration::ZERO).is_none());
    });
}

#[test]
fn a_report_is_left_to_another_thread_for_a_while() {
    run(2, b"", |rank, group| {
        let mut tensor = values(rank, 1000);
        let reduce = call(Operation::AllReduce, vec![], vec![memory(&mut tensor)]);
        let begun = Instant::now();
        let work = group.begin(&reduce, Some(LONG), false).expect("begun");
        group.watch(&work);
        let age = Duration::from_millis(50);
        assert!(Arc::ptr_eq(&group.next_ended(age).expect("an open group"), &work));
        assert!(begun.elapsed() >= age, "it was left to another thread");
        // A thread that waits without a report is told of the end.
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| group.next_ended(age));
            begin_and_wait(&group, &call(Operation::Barrier, vec![], vec![]), LONG).expect("both");
            group.close();
            assert!(waiting.join().expect("no panic").is_none());
        });
    });
}

/// Numbers by a seed.
fn draw(seed: &mut u64, end: usize) -> usize {
    *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*seed >> 33) as usize % end
}

/// Calls drawn sums and broadcasts of a group, some of them at once, and compares the results.
fn drawn_collectives(rank: u32, size: u32, group: &Group, mut seed: u64) {
    let mut running = Vec::new();
    for number in 0..60 {
        let operation = [Operation::AllReduce, Operation::Broadcast][draw(&mut seed, 2)];
        let length = [1, 7, 300, 20_000][draw(&mut seed, 4)];
        let of = |rank: u32, it: usize| value(rank, it + number);
        let mut tensor: Vec<i32> = (0..length).map(|it| of(rank, it)).collect();
        let call = call(operation, vec![], vec![memory(&mut tensor)]);
        let work = group.begin(&call, Some(LONG), false).expect("begun");
        let expected: Vec<i32> = match operation {
            Operation::Broadcast => (0..length).map(|it| of(1, it)).collect(),
            _ => (0..length).map(|it| (0..size).map(|rank| of(rank, it)).sum()).collect(),
        };
        running.push((work, tensor, expected));
        if running.len() > draw(&mut seed, 5) {
            for (work, tensor, expected) in running.drain(..) {
                group.wait(&work, None, &mut || false).expect("a result");
                assert_eq!(tensor, expected, "collective {number}");
            }
        }
    }
    let mut last = running.into_iter();
    assert!(last.all(|it| group.wait(&it.0, None, &mut || false).is_ok() && it.1 == it.2));
}

/// Sends drawn messages to the next rank and receives those of the rank before, by a tag of their own.
fn drawn_messages(rank: u32, size: u32, group: &Group, mut seed: u64, tag: u32) {
    for number in 0..80 {
        let length = [0, 3, 1_000, 30_000][draw(&mut seed, 4)];
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let mut own: Vec<i32> = (0..length).map(|it| value(rank, it + number)).collect();
        let mut got = vec![0; length];
        let begin = |operation, peer, it: &mut [i32]| {
            let memory = memory(it);
            group.begin_message(operation, Some(peer), tag, memory, Some(LONG)).expect("begun")
        };
        let sent = begin(Operation::Send, next, &mut own);
        if draw(&mut seed, 3) == 0 {
            thread::yield_now();
        }
        let received = begin(Operation::Receive, before, &mut got);
        for work in [received, sent] {
            group.wait(&work, None, &mut || false).expect("a message");
        }
        let expected: Vec<i32> = (0..length).map(|it| value(before, it + number)).collect();
        assert_eq!(got, expected, "message {number} with tag {tag}");
    }
}

/// `GRADLANE_GROUP_SEED` is the seed.
#[test]
fn drawn_calls_of_several_threads_in_several_groups_do_not_meet() {
    let given = std::env::var("GRADLANE_GROUP_SEED").ok().and_then(|it| it.parse().ok());
    let seed: u64 = given.unwrap_or(std::process::id().into());
    eprintln!("GRADLANE_GROUP_SEED={seed}");
    let groups: Vec<_> = (0..2_u64)
        .map(|number| {
            thread::spawn(move || {
                run(3, b"", move |rank, group| {
                    let (group, seed) = (&group, seed + number);
                    thread::scope(|scope| {
                        scope.spawn(move || drawn_collectives(rank, 3, group, seed));
                        for tag in 0..2 {
                            scope.spawn(move || drawn_messages(rank, 3, group, seed + 7, tag));
                        }
                    });
                    let last = call(Operation::Barrier, vec![], vec![]);
                    begin_and_wait(group, &last, LONG).expect("all");
                });
            })
        })
        .collect();
    groups.into_iter().for_each(|it| it.join().expect("a group"));
}
