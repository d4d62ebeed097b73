//! `allstream demo`: several processes train a small network on handwritten digits together, then
//! check that they got the same weights as each other and as one process alone.

mod bench;
mod data;
mod net;
mod train;

use std::ffi::OsString;
use std::hash::{DefaultHasher, Hasher};
use std::num::NonZeroUsize;
use std::time::Instant;

use allstream::{Comm, Rendezvous};

use crate::console::Console;
use crate::error::BoxError;
use crate::{Exit, launch, own};

use data::{CLASSES, PIXELS, Split};
use train::{Event, Plan, Share, train};

/// Test accuracy that the demo has to reach.
const REQUIRED_ACCURACY: f32 = 0.95;
/// How much a weight may differ between the training in several processes and that in one. Both do the
/// same arithmetic, but add the gradients of the rows up in different orders, and so round differently.
const ALLOWED_DIFFERENCE: f32 = 1e-4;
/// Epochs without `--epochs`.
const EPOCHS: usize = 30;

/// Train a small network on handwritten digits in several processes, and check the result
#[derive(Debug, clap::Args)]
pub(crate) struct DemoArgs {
    /// Number of processes
    #[arg(short = 'n', long, default_value = "4")]
    ranks: NonZeroUsize,
    /// Passes over the training data
    #[arg(long, default_value_t = EPOCHS)]
    epochs: usize,
    /// Be one of the processes, as the launcher's environment says
    #[arg(long, hide = true)]
    worker: bool,
}

/// Runs the demo: starts the processes, or is one of them. Fails if a check does.
pub(crate) fn run(args: DemoArgs) -> Result<Exit, BoxError> {
    if args.worker {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(work(plan(args.epochs)))?;
        return Ok(Exit::SUCCESS);
    }
    let mut worker: Vec<OsString> = ["demo", "--worker", "--epochs"].map(Into::into).into();
    worker.push(args.epochs.to_string().into());
    let ranks = args.ranks.get();
    let (program, args) = own::program(worker)?;
    Ok(launch::run(launch::Job { ranks, program, args, prefix: false, ..Default::default() })?)
}

/// The training that the demo does.
fn plan(epochs: usize) -> Plan {
    Plan {
        widths: vec![PIXELS, 64, 32, CLASSES],
        epochs,
        global_batch: 128,
        rate: 0.1,
        momentum: 0.9,
        seed: 1998,
    }
}

/// One process of the demo. Only rank 0 prints.
async fn work(plan: Plan) -> Result<(), BoxError> {
    let data = data::load()?;
    let mut comm = Comm::connect(Rendezvous::from_env()?).await?;
    let share = Share { rank: comm.rank(), size: comm.size() };
    let console = Console::new(share.rank == 0);
    console.line(&introduction(&plan, &data, share.size))?;
    console.line("")?;

    let start = Instant::now();
    let bar = console.bar("training", plan.steps(data.train.len()));
    let weights = train(
        &plan,
        &data,
        share,
        async |grads| Ok(comm.all_reduce(grads).await?),
        |event| {
            match event {
                Event::Step => bar.inc(1),
                Event::Epoch(epoch) => console.line(&format!(
                    "epoch {:>2}/{}  loss {:.4}  train {:>5.1} %  test {:>5.1} %",
                    epoch.number,
                    plan.epochs,
                    epoch.loss,
                    100.0 * epoch.train_accuracy,
                    100.0 * epoch.test_accuracy,
                ))?,
            }
            Ok(())
        },
    )
    .await?;
    bar.finish_and_clear();
    let seconds = start.elapsed().as_secs_f64();
    console.line(&format!("trained in {seconds:.2} s"))?;
    console.line("")?;

    let hashes = comm.all_gather(vec![hash(&weights)]).await?;
    let times = bench::all_reduce_times(&mut comm)?;
    comm.close().await?;
    if share.rank != 0 {
        return Ok(());
    }

    // The others are done; the same training in this process alone is the reference.
    let bar = console.bar("reference", plan.steps(data.train.len()));
    let reference = train(
        &plan,
        &data,
        Share::WHOLE,
        async |grads| Ok(grads),
        |event| {
            if let Event::Step = event {
                bar.inc(1);
            }
            Ok(())
        },
    )
    .await?;
    bar.finish_and_clear();

    let results = Results {
        identical: hashes.len() == share.size && hashes.iter().all(|hash| *hash == hashes[0]),
        ranks: share.size,
        accuracy: train::accuracy(&plan.net(), &weights, &data.test),
        difference: largest_difference(&weights, &reference),
    };
    for line in results.lines() {
        console.line(&line)?;
    }
    console.line("")?;
    console.line(&format!(
        "all-reduce, f32 sum, in place, {} ranks, as `allstream perf all_reduce -N {0}` measures:",
        share.size
    ))?;
    for line in bench::table(&times) {
        console.line(&line)?;
    }
    results.check()
}

fn introduction(plan: &Plan, data: &Split, ranks: usize) -> String {
    let widths: Vec<String> = plan.widths.iter().map(usize::to_string).collect();
    format!(
        "{ranks} processes train a {} network ({} weights) on {} handwritten digits;\n\
         global batch {}, {} more digits are held out for testing",
        widths.join("-"),
        plan.net().parameters(),
        data.train.len(),
        plan.global_batch,
        data.test.len(),
    )
}

/// A hash of the weights' bits. Its algorithm is the same in every process of one executable.
fn hash(weights: &[f32]) -> u64 {
    let mut hasher = DefaultHasher::new();
    for weight in weights {
        hasher.write_u32(weight.to_bits());
    }
    hasher.finish()
}

/// The largest difference of two weights in the same place; NaN if any weight is.
fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    let differences = a.iter().zip(b).map(|(a, b)| (a - b).abs());
    // `total_cmp` puts NaN above every number.
    differences.max_by(f32::total_cmp).unwrap_or(0.0)
}

/// The results that the demo prints and checks.
#[derive(Debug)]
struct Results {
    /// Whether all ranks have the same weights, bit for bit.
    identical: bool,
    ranks: usize,
    /// Share of the test rows classified correctly.
    accuracy: f32,
    /// Largest difference of a weight to the training in one process.
    difference: f32,
}

impl Results {
    fn is_accurate(&self) -> bool {
        self.accuracy >= REQUIRED_ACCURACY
    }

    fn is_near(&self) -> bool {
        self.difference <= ALLOWED_DIFFERENCE
    }

    fn lines(&self) -> [String; 3] {
        let yes = |ok| if ok { "yes" } else { "NO" };
        [
            format!("weights bit-identical on all {} ranks: {}", self.ranks, yes(self.identical)),
            format!(
                "test accuracy {:.1} %, at least {:.0} %: {}",
                100.0 * self.accuracy,
                100.0 * REQUIRED_ACCURACY,
                yes(self.is_accurate())
            ),
            format!(
                "largest weight difference to one process {:.1e}, at most {:.0e}: {}",
                self.difference,
                ALLOWED_DIFFERENCE,
                yes(self.is_near())
            ),
        ]
    }

    /// An error that names every check that failed.
    fn check(&self) -> Result<(), BoxError> {
        let checks = [
            (self.identical, "the ranks have different weights"),
            (self.is_accurate(), "the test accuracy is too low"),
            (self.is_near(), "the weights are too far from those of one process"),
        ];
        let failed: Vec<&str> = checks.iter().filter_map(|(ok, message)| (!ok).then_some(*message)).collect();
        if failed.is_empty() { Ok(()) } else { Err(format!("demo: {}", failed.join("; ")).into()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_checks_are_errors() {
        let good = Results { identical: true, ranks: 4, accuracy: 0.97, difference: 1e-6 };
        assert!(good.check().is_ok());
        let bad = Results { identical: false, accuracy: 0.5, difference: f32::NAN, ..good };
        let message = bad.check().unwrap_err().to_string();
        assert_eq!(message.matches(';').count(), 2, "{message}");
        assert!(bad.lines().iter().all(|line| line.ends_with("NO")));
    }

    #[test]
    fn a_difference_or_a_nan_is_seen() {
        assert_eq!(largest_difference(&[1.0, 2.0], &[1.5, 2.0]), 0.5);
        assert!(largest_difference(&[f32::NAN, 2.0], &[1.5, 2.0]).is_nan());
        assert_ne!(hash(&[0.0]), hash(&[-0.0]));
    }
}
