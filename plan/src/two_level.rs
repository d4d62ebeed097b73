//! Two levels: the ranks of each host sum their data inside the host, and only these sums go between hosts.
//!
//! all_reduce: 4 hops; each of `h` hosts sends `2 (h-1)/h * count` to other hosts in all, whatever the number of its ranks
//! (by direct exchange each of its ranks would send that much).
//! Source: Träff, Rougier, "MPI collectives and datatypes for hierarchical all-to-all communication", 2014, and
//! Hidayetoğlu et al., "HiCCL: a hierarchical collective communication library", 2024; both levels are direct here.
//!
//! The data are cut into p lines of `h` chunks, where p is n/h, rounded up. In each host one rank *leads* line l: rank l of the
//! host or, if the host has fewer than p ranks, l modulo their number. Chunk (l, g) is summed inside every host by that host's
//! leader of line l, then between hosts by the leader of line l in host g; the result goes back the same way. Hosts may have any
//! number of ranks, in any order. Sums are combined host by host: in rank order only where each host's ranks are consecutive.

use crate::shape::{keep, send};
use crate::{Operand, Plan, Rank, Shape, Step};

/// Sums inside each host, then between hosts; the results go back between hosts, then inside each host.
///
/// One link carries chunks of several stages, so all ranks list the stages in the same order. *Our* chunks are those that our host
/// sums between hosts. The stages:
/// 1. other hosts' chunks: summed inside our host;
/// 2. our chunks of lines that another rank leads: sent to that rank;
/// 3. our chunks of lines that this rank leads: final sums;
/// 4. the results of the chunks of stage 2: received from that rank;
/// 5. the results of other hosts' chunks.
pub(super) fn all_reduce(s: &Shape) -> Plan {
    let mut hosts: Vec<Vec<Rank>> = Vec::new();
    for (rank, &host) in s.hosts.iter().enumerate() {
        hosts.resize(hosts.len().max(host as usize + 1), Vec::new());
        hosts[host as usize].push(rank);
    }
    let (lines, here) = (s.n.div_ceil(hosts.len()), s.hosts[s.rank] as usize);
    let lead = |host: usize, line: usize| hosts[host][line % hosts[host].len()];
    let chunk = |line: usize, host: usize| line * hosts.len() + host;
    let inside = |except: Rank| hosts[here].iter().copied().filter(move |&p| p != except);
    // Our host's contributions to a chunk, in rank order.
    let ours =
        |c: usize| hosts[here].iter().map(move |&p| if p == s.rank { s.own(c) } else { Operand::Recv(p) });
    let away = || (0..lines).flat_map(|l| (0..hosts.len()).map(move |g| (l, g))).filter(|&(_, g)| g != here);
    let leads = |line: usize| lead(here, line) == s.rank;

    let mut steps = Vec::new();
    for (line, host) in away() {
        let c = chunk(line, host);
        if leads(line) {
            let alone = hosts[here].len() == 1;
            let dst = (!alone).then(|| s.out(c));
            let to = vec![lead(host, line)];
            steps.push(Step { operands: ours(c).collect(), dst, send: to, ..Step::default() });
        } else {
            steps.push(send(s.own(c), vec![lead(here, line)]));
        }
    }
    for line in (0..lines).filter(|&l| !leads(l)) {
        steps.push(send(s.own(chunk(line, here)), vec![lead(here, line)]));
    }
    for line in (0..lines).filter(|&l| leads(l)) {
        let c = chunk(line, here);
        let of = |host: usize| -> Vec<Operand> {
            if host == here { ours(c).collect() } else { vec![Operand::Recv(lead(host, line))] }
        };
        let operands = (0..hosts.len()).flat_map(of).collect();
        let others = (0..hosts.len()).filter(|&h| h != here).map(|h| lead(h, line));
        let mut send: Vec<Rank> = others.chain(inside(s.rank)).collect();
        send.sort_unstable();
        steps.push(Step { operands, dst: Some(s.out(c)), send, finish: true, ..Step::default() });
    }
    for line in (0..lines).filter(|&l| !leads(l)) {
        steps.push(keep(Operand::Recv(lead(here, line)), s.out(chunk(line, here))));
    }
    for (line, host) in away() {
        let (from, to) = if leads(line) {
            (lead(host, line), inside(s.rank).collect())
        } else {
            (lead(here, line), vec![])
        };
        steps.push(Step { send: to, ..keep(Operand::Recv(from), s.out(chunk(line, host))) });
    }
    s.split(lines * hosts.len(), steps)
}

/// Why this algorithm cannot be used for this shape, or `None` if it can.
pub(super) fn unsuitable(s: &Shape) -> Option<String> {
    if !s.hosts.is_empty() && s.hosts.len() != s.n {
        return Some(format!("hosts are given for {} ranks, in a group of {}", s.hosts.len(), s.n));
    }
    let hosts = s.hosts.iter().max().map_or(1, |&last| last as usize + 1);
    if hosts > s.n || !(0..hosts as u32).all(|host| s.hosts.is_empty() || s.hosts.contains(&host)) {
        return Some("hosts are not numbered from 0 without a gap".into());
    }
    match hosts {
        1 => Some("all ranks share one host: there is nothing between hosts".into()),
        h if h == s.n => Some("every rank is alone on its host: there is nothing inside hosts".into()),
        _ => None,
    }
}
