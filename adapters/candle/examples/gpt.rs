//! A character-level GPT, trained data parallel in segments, compared with the same training in one process.
//!
//! Teaches: the model is cut between its blocks, so that the gradients of one block are averaged while the next one goes backwards.
//! Its embedding is also its last layer (tied weights): a variable in two segments. The text is this repository's Apache licence.
//!
//! `cargo run --release --example gpt`

use std::thread;

use allstream::{Comm, SharedComm};
use allstream_candle::{DataParallel, Segments};
use candle_core::{D, DType, Device, Error, Module, Result, Tensor};
use candle_nn::{
    Embedding, LayerNorm, Linear, Optimizer, SGD, VarBuilder, VarMap, embedding, layer_norm_no_bias, linear,
    linear_no_bias, loss, ops,
};

const TEXT: &str = include_str!("../../../LICENSE-APACHE");
const CONTEXT: usize = 32;
const WIDTH: usize = 32;
const HEADS: usize = 2;
const BLOCKS: usize = 2;
const BATCH: usize = 8;
const STEPS: usize = 100;

/// What a rank has at its end.
pub struct Trained {
    /// The weights, by name.
    pub weights: Vec<(String, Tensor)>,
    /// The mean loss of this rank's part of the batch, by step.
    pub losses: Vec<f32>,
}

struct Block {
    norms: [LayerNorm; 2],
    queries_keys_values: Linear,
    output: Linear,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    fn new(vb: VarBuilder) -> Result<Block> {
        // With a bias candle takes a kernel that has no gradient.
        let norm = |name| layer_norm_no_bias(WIDTH, 1e-5, vb.pp(name));
        Ok(Block {
            norms: [norm("norm_1")?, norm("norm_2")?],
            queries_keys_values: linear_no_bias(WIDTH, 3 * WIDTH, vb.pp("queries_keys_values"))?,
            output: linear_no_bias(WIDTH, WIDTH, vb.pp("output"))?,
            wide: linear(WIDTH, 4 * WIDTH, vb.pp("wide"))?,
            narrow: linear(4 * WIDTH, WIDTH, vb.pp("narrow"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x = (self.attention(&self.norms[0].forward(x)?, mask)? + x)?;
        let wide = self.wide.forward(&self.norms[1].forward(&x)?)?.gelu()?;
        self.narrow.forward(&wide)? + x
    }

    fn attention(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, length, width) = x.dims3()?;
        let all = self.queries_keys_values.forward(x)?.reshape((batch, length, 3, HEADS, width / HEADS))?;
        let part = |i: usize| all.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
        let scores = (queries.matmul(&keys.t()?.contiguous()?)? / ((width / HEADS) as f64).sqrt())?;
        let weights = ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)?;
        let y = weights.matmul(&values)?.transpose(1, 2)?.reshape((batch, length, width))?;
        self.output.forward(&y)
    }
}

struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    /// 0 where a character may look at another one, and far below it where that one comes later.
    mask: Tensor,
}

impl Gpt {
    fn new(characters: usize, vars: &VarMap) -> Result<Gpt> {
        let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
        let mask = (0..CONTEXT * CONTEXT).map(|i| if i % CONTEXT > i / CONTEXT { -1e9f32 } else { 0.0 });
        Ok(Gpt {
            tokens: embedding(characters, WIDTH, vb.pp("tokens"))?,
            positions: embedding(CONTEXT, WIDTH, vb.pp("positions"))?,
            blocks: (0..BLOCKS).map(|i| Block::new(vb.pp(format!("block_{i}")))).collect::<Result<_>>()?,
            norm: layer_norm_no_bias(WIDTH, 1e-5, vb.pp("norm"))?,
            mask: Tensor::from_iter(mask, &Device::Cpu)?.reshape((CONTEXT, CONTEXT))?,
        })
    }

    /// The loss of a batch, computed in one segment for the embedding, one for each block, and one for the rest.
    fn loss(&self, inputs: &Tensor, targets: &Tensor, segments: &mut Segments<'_>) -> Result<Tensor> {
        let x = self.tokens.forward(inputs)?.broadcast_add(self.positions.embeddings())?;
        let mut x = segments.cut(&x)?;
        for block in &self.blocks {
            x = segments.cut(&block.forward(&x, &self.mask)?)?;
        }
        let x = self.norm.forward(&x)?.reshape(((), WIDTH))?;
        let logits = x.matmul(&self.tokens.embeddings().t()?)?;
        loss::cross_entropy(&logits, &targets.flatten_all()?)
    }
}

/// The text as numbers of its characters, and how many different ones it has.
fn characters() -> Result<(Vec<u32>, usize)> {
    let mut all: Vec<u8> = TEXT.bytes().collect();
    all.sort_unstable();
    all.dedup();
    let number =
        |byte| all.binary_search(&byte).map(|i| i as u32).map_err(|_| Error::Msg("no such character".into()));
    Ok((TEXT.bytes().map(number).collect::<Result<_>>()?, all.len()))
}

/// Gives all variables but the norms' the same numbers whenever it is called: candle's own are other ones in every run.
fn start(vars: &VarMap) -> Result<()> {
    let mut vars: Vec<_> = vars.data().lock().unwrap().clone().into_iter().collect();
    vars.sort_by(|a, b| a.0.cmp(&b.0));
    let mut state = 1u32;
    for (_, var) in vars.into_iter().filter(|(name, _)| !name.contains("norm")) {
        let values = (0..var.elem_count()).map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 * 0.2 - 0.1
        });
        var.set(&Tensor::from_iter(values, &Device::Cpu)?.reshape(var.shape())?)?;
    }
    Ok(())
}

/// Trains as one rank of `comm`, on its part of every batch.
pub fn train(comm: &SharedComm) -> Result<Trained> {
    let (text, different) = characters()?;
    let vars = VarMap::new();
    let model = Gpt::new(different, &vars)?;
    if comm.rank() == 0 {
        start(&vars)?;
    }
    let mut parallel = DataParallel::new(comm, &vars)?;
    let mut optimizer = SGD::new(vars.all_vars(), 0.15)?;
    let part = BATCH / comm.size();
    let mut losses = Vec::new();
    for step in 0..STEPS {
        // Sequence i of a step begins at the same character, whatever the number of ranks.
        let starts = (0..part).map(|i| {
            let i = step * BATCH + comm.rank() * part + i;
            i * 97 % (text.len() - CONTEXT - 1)
        });
        let from = |shift: usize| -> Result<Tensor> {
            let rows = starts.clone().flat_map(|at| text[at + shift..at + shift + CONTEXT].iter().copied());
            Tensor::from_iter(rows, &Device::Cpu)?.reshape((part, CONTEXT))
        };
        let mut segments = parallel.segments();
        let loss = model.loss(&from(0)?, &from(1)?, &mut segments)?;
        let grads = segments.backward(&loss)?;
        optimizer.step(&grads)?;
        losses.push(loss.to_scalar()?);
    }
    parallel.compare()?;
    parallel.close()?;
    let weights = vars
        .data()
        .lock()
        .unwrap()
        .iter()
        .map(|(name, var)| (name.clone(), var.as_detached_tensor()))
        .collect();
    Ok(Trained { weights, losses })
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let alone = train(&Comm::local(1)?.remove(0).share())?;
    for n in [2, 4] {
        let spawn = |comm: Comm| thread::spawn(move || train(&comm.share()));
        let ranks: Vec<_> = Comm::local(n)?.into_iter().map(spawn).collect();
        for (rank, thread) in ranks.into_iter().enumerate() {
            let trained = thread.join().map_err(|_| "a rank panicked")??;
            let mut largest = 0f32;
            for (name, weight) in &trained.weights {
                let of_one = alone.weights.iter().find(|(other, _)| other == name).ok_or("another model")?;
                largest = largest.max((weight - &of_one.1)?.abs()?.flatten_all()?.max(0)?.to_scalar()?);
            }
            let (first, last) = (trained.losses[0], trained.losses[STEPS - 1]);
            println!(
                "rank {rank} of {n}: loss {first:.2} to {last:.2}; largest weight difference to one process {largest:.1e}"
            );
        }
    }
    Ok(())
}
