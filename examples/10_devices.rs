//! Data-parallel training on two processes with two devices each.
//!
//! Teaches: a [`Node`] calls all devices of a process together: a call takes one buffer for each device, and returns as
//! many; the world has a rank for each device of each process; each device has a stream, and `join` makes the streams,
//! not the host, wait for what was reduced. On a CPU a device is just a stream.
//!
//! `cargo run --release --example 10_devices` starts the second process itself. The example also runs under a launcher,
//! which starts one process for each node: `allstream run -n 2 -- target/release/examples/10_devices`.

use std::hash::BuildHasher;
use std::net::TcpListener;
use std::process::Command;
use std::sync::mpsc::channel;

use allstream::{Node, ReduceOp, Rendezvous};
use futures::executor::block_on;

type Result<T> = std::result::Result<T, Box<dyn std::error::Error + Send + Sync>>;

const DEVICES: usize = 2;

/// The model: a slope and an offset. The data: points of the line y = 3 x + 1, different ones for each rank.
type Model = [f32; 2];

/// The mean gradient over a rank's points, and the mean loss.
fn gradient([slope, offset]: Model, rank: usize) -> Vec<f32> {
    let points: Vec<f32> = (0..64).map(|i| (4 * i + rank) as f32 / 128.0 - 1.0).collect();
    let mut sums = vec![0.0; 3];
    for x in &points {
        let error = slope * x + offset - (3.0 * x + 1.0);
        for (sum, part) in sums.iter_mut().zip([2.0 * error * x, 2.0 * error, error * error]) {
            *sum += part / points.len() as f32;
        }
    }
    sums
}

fn train(node: &mut Node) -> Result<()> {
    let (process, speaks) = (node.process(), node.process() == 0);
    let ranks = [node.rank_of(process, 0)?, node.rank_of(process, 1)?];
    let mut models = [[0.0_f32; 2]; DEVICES];
    for step in 0..=100 {
        // Each device computes the gradient of its own points, on its own stream.
        let gradients = [0, 1].map(|device| {
            let ((tell, told), model) = (channel(), models[device]);
            node.streams()[device].launch(move || drop(tell.send(gradient(model, ranks[device]))));
            told
        });
        let [g0, g1] = [gradients[0].recv()?, gradients[1].recv()?];

        // One call for both devices; each device's stream waits for its part, and then updates the device's model.
        let [g0, g1] = node.op(ReduceOp::Avg).all_reduce([g0, g1]).join(node.streams())?;
        let update = |[slope, offset]: Model| {
            move |mean: Vec<f32>| ([slope - 0.1 * mean[0], offset - 0.1 * mean[1]], mean[2])
        };
        let next =
            [g0.launch(node.stream(0)?, update(models[0])), g1.launch(node.stream(1)?, update(models[1]))];
        let mut loss = 0.0;
        for (model, next) in models.iter_mut().zip(next) {
            (*model, loss) = next.wait().map_err(|failed| failed.error)?;
        }
        if speaks && step % 25 == 0 {
            println!("step {step:3}: mean loss {loss:.6}");
        }
    }
    // Gathers the final models of all devices on all devices.
    let all = node.all_gather(models.map(|model| model.to_vec())).wait()?;
    if all[0].chunks(2).any(|model| model != models[0]) {
        return Err(format!("devices ended with different models: {:?}", all[0]).into());
    }
    if speaks {
        for (rank, model) in all[0].chunks(2).enumerate() {
            let (process, device) = node.place_of(rank);
            println!("process {process}, device {device}: y = {:.2} x + {:.2}", model[0], model[1]);
        }
    }
    Ok(())
}

fn main() -> Result<()> {
    let mut second = None;
    let place = if std::env::var_os("RANK").is_some() {
        Rendezvous::from_env()?
    } else {
        // This is the first process: it takes the port before it starts the second one.
        let (listener, token) =
            (TcpListener::bind("127.0.0.1:0")?, std::hash::RandomState::new().hash_one(0));
        let at = listener.local_addr()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.envs([("RANK", "1"), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1")]);
        command.env("MASTER_PORT", at.port().to_string()).env("ALLSTREAM_TOKEN", token.to_string());
        second = Some(command.spawn()?);
        Rendezvous::tcp(&format!("tcp://{at}"), 0, 2)?.token(token.to_string()).listener(listener)
    };
    let mut node = block_on(Node::connect(place, DEVICES))?;
    train(&mut node)?;
    block_on(node.close())?;
    match second.map(|mut second| second.wait()).transpose()? {
        Some(status) if !status.success() => Err(format!("the second process: {status}").into()),
        _ => Ok(()),
    }
}
