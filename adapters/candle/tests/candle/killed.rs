//! A process that is killed in the middle of a step: the other ranks learn which rank is lost, keep their weights, and go on without it.

use std::io::{BufRead, BufReader, Read};
use std::net::TcpListener;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use allstream::{Comm, Rendezvous, train};
use allstream_candle::{DataParallel, Options, cause};
use candle_core::backprop::GradStore;
use candle_core::{CpuStorage, CustomOp1, Layout, Result, Shape, Tensor};
use candle_nn::VarMap;
use pollster::block_on;

use crate::data_parallel::{MODEL, expected_of, gradients, loss, rows, vars};
use crate::support::close;

const RANKS: usize = 3;
const VICTIM: usize = 1;
/// How long each wait of this test may take.
const LIMIT: Duration = Duration::from_secs(60);
/// How soon the survivors must end. They notice a death at once; a rank that is only silent counts as lost after 10 s.
const SOON: Duration = Duration::from_secs(8);
/// What the victim prints when it is at the point where it is to be killed.
const THERE: &str = "in the middle of a step";
/// What the others print when their first step has ended. The victim is killed only then: a death would fail a first step that has not ended.
const READY: &str = "the first step is done";
/// How the ranks reduce: `reduce` or `segments`.
const WAY: &str = "ALLSTREAM_CANDLE_TEST_WAY";

/// Gives the input unchanged. Its backward pass waits until the process is killed.
struct Stops;

impl CustomOp1 for Stops {
    fn name(&self) -> &'static str {
        "stops"
    }
    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((storage.clone(), layout.shape().clone()))
    }
    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        wait_for_death();
        Ok(Some(grad.clone()))
    }
}

fn wait_for_death() {
    println!("{THERE}");
    thread::sleep(LIMIT);
}

/// One step. With `stops` this rank waits in it to be killed: before it reduces (`reduce`), or when its first gradients are on their way
/// (`segments`).
fn step(parallel: &mut DataParallel, vars: &VarMap, x: &Tensor, way: &str, stops: bool) -> Result<GradStore> {
    if way == "reduce" {
        let mut grads = loss(vars, x, |y| Ok(y.clone()))?.backward()?;
        if stops {
            wait_for_death();
        }
        let own = gradients(vars, &grads);
        let reduced = parallel.reduce(&mut grads);
        if reduced.is_err() {
            // All gradients that were handed in are in the store again.
            gradients(vars, &grads).iter().zip(&own).for_each(|(found, own)| close(found, own));
        }
        return reduced.map(|()| grads);
    }
    let mut segments = parallel.segments();
    let mut cuts = 0;
    let loss = loss(vars, x, |y| {
        cuts += 1;
        // In the first segment, whose backward pass is the last one.
        let y = if stops && cuts == 1 { y.apply_op1(Stops)? } else { y.clone() };
        segments.cut(&y)
    })?;
    segments.backward(&loss)
}

/// A rank, in a process of its own.
fn rank(way: &str) {
    let comm = block_on(Comm::connect(Rendezvous::from_env().unwrap().timeout(LIMIT))).unwrap();
    let (me, x) = (comm.rank(), rows(comm.rank()));
    let vars = vars(0, &MODEL);
    // A bucket for each variable, so that some are on their way when the victim dies.
    let buckets = train::Options::default().bucket_bytes(1).first_bucket_bytes(1);
    let options = Options::default().buckets(buckets);
    let mut parallel = DataParallel::with(&comm.share(), &vars, options).unwrap();
    let grads = step(&mut parallel, &vars, &x, way, false).unwrap();
    gradients(&vars, &grads).iter().zip(&expected_of(&[0, 1, 2])).for_each(|(a, b)| close(a, b));

    if me != VICTIM {
        println!("{READY}");
    }
    let Err(error) = step(&mut parallel, &vars, &x, way, me == VICTIM) else { panic!("a rank is dead") };
    let lost = cause(&error);
    assert!(matches!(lost, Some(allstream::Error::PeerLost { rank: VICTIM, .. })), "{error}");
    assert!(error.to_string().contains("rank 1"), "{error}");
    let untouched = crate::data_parallel::vars(0, &MODEL);
    for (name, _) in MODEL {
        let bits = |vars: &VarMap| {
            let values = vars.data().lock().unwrap()[name].flatten_all().unwrap().to_vec1::<f32>().unwrap();
            values.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        };
        assert_eq!(bits(&vars), bits(&untouched), "the weights of {name}");
    }
    let again = step(&mut parallel, &vars, &x, way, false).err().unwrap().to_string();
    assert!(again.contains("a step has failed before"), "{again}");

    let (comm, verdict) = block_on(comm.shrink()).unwrap();
    assert_eq!((comm.size(), &verdict.lost[..]), (RANKS - 1, &[VICTIM][..]));
    let mut parallel = DataParallel::new(&comm.share(), &vars).unwrap();
    let grads = step(&mut parallel, &vars, &x, way, false).unwrap();
    gradients(&vars, &grads).iter().zip(&expected_of(&[0, 2])).for_each(|(a, b)| close(a, b));
    parallel.close().unwrap();
}

/// Processes, which are killed when this value is dropped.
struct Ranks(Vec<Child>);

impl Drop for Ranks {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn start(way: &str, name: &str) -> Ranks {
    // No other process is likely to take the port before rank 0 does.
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let start = |rank: usize| {
        Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture", "--test-threads", "1"])
            .envs([("RANK", rank.to_string()), ("WORLD_SIZE", RANKS.to_string())])
            .envs([("MASTER_ADDR", "127.0.0.1".into()), ("MASTER_PORT", port.to_string())])
            .envs([("ALLSTREAM_TOKEN", format!("{port}-of-a-test")), (WAY, way.into())])
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
    };
    Ranks((0..RANKS).map(start).collect())
}

/// Reads what a process says, so that the test can tell why it failed.
fn reader(mut from: impl Read + Send + 'static) -> thread::JoinHandle<String> {
    thread::spawn(move || {
        let mut said = Vec::new();
        let _ = from.read_to_end(&mut said);
        String::from_utf8_lossy(&said).into_owned()
    })
}

#[test]
fn a_killed_rank_is_named_and_the_others_keep_their_weights_and_go_on() {
    if let Ok(way) = std::env::var(WAY) {
        return rank(&way);
    }
    for way in ["reduce", "segments"] {
        let mut ranks =
            start(way, "killed::a_killed_rank_is_named_and_the_others_keep_their_weights_and_go_on");
        let (tell, told) = mpsc::channel();
        for child in &mut ranks.0 {
            let (output, tell) = (BufReader::new(child.stdout.take().unwrap()), tell.clone());
            thread::spawn(move || {
                for line in output.lines().map_while(std::result::Result::ok) {
                    if line.contains(THERE) || line.contains(READY) {
                        let _ = tell.send(());
                    }
                }
            });
        }
        let said: Vec<_> = ranks.0.iter_mut().map(|child| reader(child.stderr.take().unwrap())).collect();
        for _ in 0..RANKS {
            told.recv_timeout(LIMIT)
                .expect("the victim comes to the middle of a step, and the others to its begin");
        }
        let killed = Instant::now();
        ranks.0[VICTIM].kill().unwrap();
        for (survivor, said) in said.into_iter().enumerate().filter(|(rank, _)| *rank != VICTIM) {
            let status = loop {
                match ranks.0[survivor].try_wait().unwrap() {
                    Some(status) => break status,
                    None if killed.elapsed() > SOON => panic!("{way}: rank {survivor} still waits"),
                    None => thread::sleep(Duration::from_millis(10)),
                }
            };
            let said = said.join().unwrap();
            assert!(status.success(), "{way}: rank {survivor}: {status}; it said: {said}");
        }
    }
}
