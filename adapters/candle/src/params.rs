//! The variables of a model, in the same order on all ranks: how they are compared and broadcast.

use allstream::SharedComm;
use candle_core::{DType, Result, Var, bail};
use candle_nn::VarMap;

use crate::Broadcast;
use crate::error::failed;
use crate::gpu;
use crate::storage::fingerprint;

/// The most names that an error lists.
const MOST_NAMED: usize = 8;

/// The last parts of the names that candle_nn's `BatchNorm` gives its running statistics.
const BATCH_NORM: [&str; 2] = ["running_mean", "running_var"];

/// A variable and its name.
pub(crate) struct Param {
    pub(crate) name: String,
    pub(crate) var: Var,
    /// Whether it is a buffer: it has no gradient, and forward passes may change it.
    pub(crate) is_buffer: bool,
}

impl Param {
    /// The text that ranks compare and errors show.
    fn describe(&self) -> String {
        let place = if self.var.device().is_cpu() { "" } else { " on a device" };
        let kind = if self.is_buffer { ", a buffer" } else { "" };
        format!("{} ({} {:?}{place}{kind})", self.name, self.var.dtype().as_str(), self.var.dims())
    }
}

/// Whether a variable is a buffer: if it is of integers, a running statistic of a `BatchNorm`, or named in `more`.
fn is_buffer(name: &str, dtype: DType, more: &[&str]) -> bool {
    let last = name.rsplit('.').next().unwrap_or(name);
    !dtype.is_float()
        || BATCH_NORM.contains(&last)
        || more.iter().any(|other| *other == last || *other == name)
}

/// The variables of a map, sorted by name, as a map has no order of its own. `buffers`: names of buffers, besides the usual ones.
pub(crate) fn sorted(vars: &VarMap, buffers: &[&str]) -> Result<Vec<Param>> {
    let Ok(data) = vars.data().lock() else {
        bail!(
            "DataParallel: a thread panicked while it changed the VarMap, expected one that is whole: make it anew"
        );
    };
    let param = |(name, var): (&String, &Var)| {
        let is_buffer = is_buffer(name, var.dtype(), buffers);
        Param { name: name.clone(), var: var.clone(), is_buffer }
    };
    let mut params: Vec<Param> = data.iter().map(param).collect();
    params.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(params)
}

/// Compares the options, and the names, types and shapes of the variables, between all ranks: all ranks get the same verdict. A rank that cannot use
/// one of its variables says so here, so that all ranks get that error.
pub(crate) fn agree(comm: &SharedComm, options: String, params: &[Param]) -> Result<()> {
    const DOING: &str = "compare the options and variables of all ranks";
    let refused =
        |param: &Param| gpu::check(&format!("DataParallel: variable {}", param.name), &param.var).err();
    let not_on_cpu = params.iter().filter(|param| !param.var.device().is_cpu());
    let refusal = not_on_cpu.filter_map(refused).map(|error| error.to_string()).next();
    let ours: Vec<String> = [options].into_iter().chain(params.iter().map(Param::describe)).collect();
    let text = ours.join(BETWEEN).into_bytes();
    let theirs = comm.broadcast_bytes(text.clone(), 0).wait().map_err(|e| failed(DOING, e.error))?;
    let complaint = refusal.or_else(|| {
        // Both texts are split, ours as well: so a name that has the separator in it makes no difference.
        let (ours, theirs) = (String::from_utf8_lossy(&text), String::from_utf8_lossy(&theirs));
        difference(&ours.split(BETWEEN).collect::<Vec<_>>(), &theirs.split(BETWEEN).collect::<Vec<_>>())
    });
    let all = comm.all_gather_bytes(complaint.unwrap_or_default().into_bytes()).wait();
    let all = all.map_err(|e| failed(DOING, e.error))?;
    match all.iter().position(|complaint| !complaint.is_empty()) {
        Some(rank) => {
            bail!("DataParallel: on rank {rank}, {}", String::from_utf8_lossy(&all[rank]))
        }
        None if params.is_empty() => bail!(
            "DataParallel: the VarMap has no variables, expected those of a model: build the model from it before DataParallel::new"
        ),
        None => Ok(()),
    }
}

/// Stands between the options and the texts of the variables where ranks compare them. No name has it, if a person has written the name.
const BETWEEN: &str = "\0";

/// The first difference between this rank's options and variables, sorted by name, and rank 0's. Each list has the text of the options, and then a
/// text for each variable ([`Param::describe`]).
fn difference(ours: &[&str], theirs: &[&str]) -> Option<String> {
    const SAME: &str = "build the same model on every rank before DataParallel::new";
    let at = (0..ours.len().max(theirs.len())).find(|i| ours.get(*i) != theirs.get(*i))?;
    let (our, their) = (ours.get(at), theirs.get(at));
    if at == 0 {
        let [our, their] = [our, their].map(|text| text.copied().unwrap_or("nothing"));
        return Some(format!(
            "the options are {our}, and on rank 0 {their}: give the same Options on every rank"
        ));
    }
    // If a rank lacks a variable, the ranks have different variables at this place. The lists are sorted by name, so the name that comes first is
    // that of the lacking variable. In each text, type and shape follow the name.
    let name = |text: &&str| text.rsplit_once(" (").map_or(*text, |(name, _)| name).to_owned();
    Some(match (our, their) {
        (Some(our), Some(their)) if name(our) == name(their) => {
            format!("a variable is {our}, and on rank 0 {their}: {SAME}")
        }
        (Some(our), their) if their.is_none_or(|their| name(our) < name(their)) => {
            format!("there is a variable {our}, and none of that name on rank 0: {SAME}")
        }
        (_, their) => {
            let their = their.copied().unwrap_or("nothing");
            format!("there is no variable {}, and on rank 0 {their}: {SAME}", name(&their))
        }
    })
}

/// Gives every rank rank 0's values. On the CPU nothing is copied: the values are written into the variables' own memory.
pub(crate) fn broadcast(comm: &SharedComm, params: &[Param]) -> Result<()> {
    let op = Broadcast::new(comm, 0);
    params.iter().try_for_each(|param| {
        param.var.inplace_op1(&op).map_err(|e| e.context(format!("broadcast {}", param.name)))
    })
}

/// Compares the bits of variables between all ranks, by a fingerprint of each.
pub(crate) fn compare(comm: &SharedComm, params: &[&Param], at: &str) -> Result<()> {
    let ours = params.iter().map(|param| fingerprint(&param.name, &param.var)).collect::<Result<Vec<_>>>()?;
    let all = comm.all_gather(ours).wait();
    let all = all.map_err(|e| failed("compare the variables of all ranks", e.error))?;
    let differs = |i: usize, rank: usize| all[rank * params.len() + i] != all[i];
    // Names each variable once, with the ranks on which it differs from rank 0's.
    let found = |are_buffers: bool| {
        let these = (0..params.len()).filter(|i| params[*i].is_buffer == are_buffers);
        let named = these.filter_map(|i| {
            let ranks: Vec<usize> = (1..comm.size()).filter(|rank| differs(i, *rank)).collect();
            (!ranks.is_empty()).then(|| format!("{} on {}", params[i].name, ranks_as_text(&ranks)))
        });
        list(named.collect::<Vec<_>>().iter().map(String::as_str), "; ")
    };
    let (weights, buffers) = (found(false), found(true));
    if !weights.is_empty() {
        bail!(
            "DataParallel: the weights are not the same on all ranks {at}: {weights}: not as on rank 0, expected the same bits. \
             Change weights by what all ranks have alike, the reduced gradients, only; clip these by DataParallel::clip_norm, as a norm summed by \
             hand over VarMap::all_vars has another order, and so other bits, on each rank"
        )
    }
    if !buffers.is_empty() {
        bail!(
            "DataParallel: the weights are the same on all ranks {at}, and the buffers are not: {buffers}: not as on rank 0, expected \
             the same bits: a forward pass in training changes buffers, and the end of a step makes them alike again; compare between \
             that and the next forward pass"
        )
    }
    Ok(())
}

/// Lists ranks for an error.
fn ranks_as_text(ranks: &[usize]) -> String {
    let names: Vec<String> = ranks.iter().map(usize::to_string).collect();
    let plural = if ranks.len() == 1 { "rank" } else { "ranks" };
    format!("{plural} {}", list(names.iter().map(String::as_str), ", "))
}

/// Lists names for an error, at most `MOST_NAMED`.
pub(crate) fn list<'a>(names: impl Iterator<Item = &'a str>, between: &str) -> String {
    let names: Vec<&str> = names.collect();
    let shown = names[..names.len().min(MOST_NAMED)].join(between);
    match names.len().checked_sub(MOST_NAMED) {
        None | Some(0) => shown,
        Some(more) => format!("{shown} and {more} more"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_variable_that_one_rank_lacks_is_named_and_not_the_next_one() {
        let zero = ["options", "a (f32 [1])", "b (f32 [2])", "c (f32 [3])"];
        let said = |ours: &[&str]| difference(ours, &zero);
        assert_eq!(said(&zero), None);
        let found = |ours: &[&str], expected: &str| {
            let said = said(ours).unwrap();
            assert!(said.starts_with(expected) && said.contains("on every rank"), "{said}");
        };
        let [options, a, b, c] = zero;
        found(&[options, a, c], "there is no variable b, and on rank 0 b (f32 [2]): ");
        found(&[options, a, b], "there is no variable c, and on rank 0 c (f32 [3]): ");
        found(
            &[options, a, "aa (f32 [9])", b, c],
            "there is a variable aa (f32 [9]), and none of that name on rank 0: ",
        );
        found(
            &[options, a, b, c, "d (f32 [4])"],
            "there is a variable d (f32 [4]), and none of that name on rank 0: ",
        );
        found(&[options, a, b, "c (f32 [4])"], "a variable is c (f32 [4]), and on rank 0 c (f32 [3]): ");
        found(&["others", a, b, c], "the options are others, and on rank 0 options: ");
        // The names alone are compared, and parentheses may be in them.
        assert_eq!(difference(&[options, "x (1) (f32 [1])"], &[options, "x (1) (f32 [1])"]), None);
    }
}
