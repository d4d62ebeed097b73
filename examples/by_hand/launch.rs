//! The options, and the processes: without a launcher this process is rank 0 and starts the others.

#[path = "../shared/others.rs"]
mod others;

use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::time::Duration;

use allstream::{Comm, LinkChoice, Rendezvous};
use futures::executor::block_on;

use self::others::{Others, secret};
use super::{ALGORITHMS, Result};

pub(crate) const USAGE: &str = "\
usage: by_hand [options]
  --ranks N     processes (default 8; under a launcher, as many as it says)
  --size N      f32 in each (default 8388608)
  --trials N    trials that count (default 10)
  --algo NAME   all, naive, ring, bde or mst, each beside allstream's own (default all)
  --link LINK   auto, shm or tcp (default auto)
  --log         print every message of the last trial, not only what they come to";

/// How long ranks wait for each other at the start, and rank 0 for the others to end.
const PATIENCE: Duration = Duration::from_secs(30);

/// What is to be run; the same on all ranks.
pub(crate) struct Options {
    pub(crate) ranks: usize,
    pub(crate) size: usize,
    pub(crate) trials: usize,
    pub(crate) algo: String,
    pub(crate) link: String,
    pub(crate) log: bool,
}

impl Options {
    /// `None` where help was asked for.
    pub(crate) fn parse(args: impl Iterator<Item = String>) -> Result<Option<Options>> {
        let (algo, link) = ("all".into(), "auto".into());
        let mut options = Options { ranks: 8, size: 1 << 23, trials: 10, algo, link, log: false };
        let mut args = args;
        while let Some(name) = args.next() {
            let mut value = || args.next().ok_or_else(|| format!("{name} needs a value\n{USAGE}"));
            let number = |text: String, least: usize| {
                let found = text.parse().ok().filter(|n| *n >= least);
                found.ok_or_else(|| format!("{name} is `{text}`; expected a number from {least} up"))
            };
            match name.as_str() {
                "--ranks" => options.ranks = number(value()?, 1)?,
                "--size" => options.size = number(value()?, 0)?,
                "--trials" => options.trials = number(value()?, 1)?,
                "--algo" => options.algo = value()?,
                "--link" => options.link = value()?,
                "--log" => options.log = true,
                "--help" | "-h" => return Ok(None),
                other => return Err(format!("unknown option `{other}`\n{USAGE}").into()),
            }
        }
        let known = |(name, _): &(&str, super::AllReduce)| *name == options.algo;
        if options.algo != "all" && !ALGORITHMS.iter().any(known) {
            return Err(format!("no algorithm `{}`\n{USAGE}", options.algo).into());
        }
        Ok(Some(options))
    }

    /// Whether the algorithm is to be run: allstream's own always is.
    pub(crate) fn wants(&self, name: &str) -> bool {
        name == "allstream" || self.algo == "all" || self.algo == name
    }
}

/// Runs `rank` on a communicator. If the environment names a rank (a launcher or rank 0 has started this process), this
/// process is that rank; otherwise it starts the others and is rank 0.
pub(crate) fn launch(options: &Options, rank: impl Fn(Comm) -> Result<bool>) -> Result<bool> {
    if std::env::var_os("RANK").is_some() {
        return rank(block_on(Comm::connect(Rendezvous::from_env()?.timeout(PATIENCE)))?);
    }
    let link: LinkChoice =
        options.link.parse().map_err(|wanted| format!("--link is `{}`; {wanted}", options.link))?;
    // Rank 0 listens before the other ranks are told the port, so no other program can take it.
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let at = listener.local_addr()?;
    let token = secret()?;
    let mut others = Others(Vec::new());
    for rank in 1..options.ranks {
        let child = Command::new(std::env::current_exe()?)
            .args(std::env::args_os().skip(1))
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", options.ranks.to_string())
            .env("MASTER_ADDR", at.ip().to_string())
            .env("MASTER_PORT", at.port().to_string())
            .env("ALLSTREAM_TOKEN", &token)
            .env("ALLSTREAM_LINK", &options.link)
            .env_remove("ALLSTREAM_HOST_ID")
            .stdin(Stdio::null())
            .spawn()?;
        others.0.push((rank, child));
    }
    let meeting = Rendezvous::tcp(&format!("tcp://{at}"), 0, options.ranks)?;
    let meeting = meeting.token(token).link(link).timeout(PATIENCE).listener(listener);
    let right = rank(block_on(Comm::connect(meeting))?)?;
    // A rank that ends with code 1 has found a wrong sum. This is not reported here, as rank 0 knows it already.
    others.wait(PATIENCE, |code| matches!(code, 0 | 1))?;
    Ok(right)
}
