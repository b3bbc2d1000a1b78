//! Pushes a model through loopback with several ranks in one process, and prints the rate and the
//! CPU seconds per gigabyte of each kind of thread.
//!
//! `cargo run --release -p gradlane-net --example loopback -- [megabytes] [ranks] [steps] [frame
//! bytes] [credit bytes] [low water bytes] [work threads] [receive buffer bytes] [trace] [lanes]
//! [seal]`

use gradlane_engine::{Plan, Strategy, TensorKind, TensorSpec, Update};
use gradlane_net::{Channel, ChannelOptions, Listener, MetricsSnapshot, UserMemory};
use gradlane_units::{Dtype, Step, TensorId};
use std::error::Error;
use std::time::Instant;

/// Elements of a tensor: that of a middle layer.
const TENSOR_ELEMS: u64 = 1_000_000;
const SECRET: &[u8] = b"no secret, since it is printed here";

fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let arguments: Vec<u64> =
        std::env::args().skip(1).map(|it| it.parse()).collect::<Result<_, _>>()?;
    let argument = |index: usize, default: u64| arguments.get(index).copied().unwrap_or(default);
    let (megabytes, ranks, steps) = (argument(0, 100), argument(1, 2) as u32, argument(2, 10));
    let tensors = (megabytes * 1_000_000 / 4).div_ceil(TENSOR_ELEMS);
    let specs = (0..tensors).map(|index| TensorSpec {
        name: format!("tensor{index}"),
        numel: TENSOR_ELEMS,
        dtype: Dtype::F32,
        kind: TensorKind::Parameter,
    });
    let strategy = Strategy::named("p3", None, 0)?;
    let plan = Plan::build(specs.collect(), strategy, Update::Worker, ranks)?;
    let plan = serde_json::to_string(&plan)?;
    let bind = |_| Listener::bind("127.0.0.1", 0..=0);
    let listeners: Vec<Listener> = (0..ranks).map(bind).collect::<Result<_, _>>()?;
    let peers: Vec<String> = listeners.iter().map(|it| it.address().to_string()).collect();
    let threads: Vec<_> = listeners
        .into_iter()
        .enumerate()
        .map(|(rank, listener)| {
            let mut options = ChannelOptions::new(rank as u32, ranks);
            options.frame_bytes = argument(3, options.frame_bytes.into()) as u32;
            options.credit_bytes = argument(4, options.credit_bytes);
            options.low_water_bytes = argument(5, options.low_water_bytes.into()) as u32;
            options.work_threads = argument(6, options.work_threads as u64) as usize;
            options.receive_buffer_bytes = argument(7, 0) as u32;
            options.trace = argument(8, 0) > 0;
            options.lanes = argument(9, options.lanes.into()) as u16;
            options.seal = argument(10, 0) > 0;
            let (plan, peers) = (plan.clone(), peers.clone());
            std::thread::spawn(move || run(listener, &options, &plan, &peers, steps))
        })
        .collect();
    let mut readings = Vec::new();
    let mut longest_s = 0.0_f64;
    for thread in threads {
        let (reading, wall_s) = thread.join().map_err(|_| "a rank panicked")??;
        longest_s = longest_s.max(wall_s);
        readings.push(reading);
    }
    report(&readings, longest_s, steps);
    Ok(())
}

type RankResult = Result<(MetricsSnapshot, f64), Box<dyn Error + Send + Sync>>;

fn run(
    listener: Listener,
    options: &ChannelOptions,
    plan: &str,
    peers: &[String],
    steps: u64,
) -> RankResult {
    let channel = Channel::connect(listener, options, plan, peers, SECRET, &mut || false)?;
    let tensors = channel.plan().tensors.len();
    let mut gradients = vec![vec![1.0_f32; TENSOR_ELEMS as usize]; tensors];
    step(&channel, Step(0), &mut gradients)?;
    let (before, start) = (channel.metrics(), Instant::now());
    for number in 1..=steps {
        step(&channel, Step(number), &mut gradients)?;
    }
    let (after, wall_s) = (channel.metrics(), start.elapsed().as_secs_f64());
    channel.finish(std::time::Duration::from_secs(60), &mut || false)?;
    let difference = MetricsSnapshot {
        tx_bytes: after.tx_bytes - before.tx_bytes,
        rx_bytes: after.rx_bytes - before.rx_bytes,
        tx_frames: after.tx_frames - before.tx_frames,
        io_cpu_s: after.io_cpu_s - before.io_cpu_s,
        work_cpu_s: after.work_cpu_s - before.work_cpu_s,
        turns: after.turns - before.turns,
        ..after
    };
    Ok((difference, wall_s))
}

fn step(
    channel: &Channel,
    step: Step,
    gradients: &mut [Vec<f32>],
) -> Result<(), gradlane_net::ChannelError> {
    channel.step_begin(step)?;
    for (index, gradient) in gradients.iter_mut().enumerate().rev() {
        let address = gradient.as_mut_ptr().expose_provenance();
        // SAFETY: the gradients outlive the channel's use: the step is waited for below, and when
        // waiting fails, the session has ended.
        let memory = unsafe { UserMemory::new(address, gradient.len() * 4) };
        channel.gradient_ready(TensorId(index as u32), step, memory)?;
    }
    channel.step_end(step)?;
    channel.wait_step(step, &mut || false)
}

fn report(readings: &[MetricsSnapshot], wall_s: f64, steps: u64) {
    let total = |of: fn(&MetricsSnapshot) -> f64| readings.iter().map(of).sum::<f64>();
    let sent_gb = total(|it| it.tx_bytes as f64) / 1e9;
    let (io_s, work_s) = (total(|it| it.io_cpu_s), total(|it| it.work_cpu_s));
    println!("ranks {}, steps {steps}, wall {wall_s:.3} s", readings.len());
    println!("sent by all ranks     {sent_gb:8.3} GB  {:8.3} GB/s", sent_gb / wall_s);
    println!("I/O threads           {io_s:8.3} s   {:8.3} CPU s/GB sent", io_s / sent_gb);
    println!("work threads          {work_s:8.3} s   {:8.3} CPU s/GB sent", work_s / sent_gb);
    let per_frame = total(|it| it.turns as f64) / total(|it| it.tx_frames as f64);
    println!("turns per frame sent  {per_frame:8.3}");
    let scratch_mb = total(|it| it.scratch_bytes as f64) / 1e6;
    println!("scratch buffers       {scratch_mb:8.1} MB");
}
