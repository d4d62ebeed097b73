//! A character-level GPT, trained data parallel in segments, compared with the same training in one process.
//!
//! Teaches: the model is cut between its blocks, so that the gradients of one block are averaged while the next one goes backwards.
//! Its embedding is also its last layer (tied weights): a variable in two segments. The text is this repository's Apache licence.
//!
//! `cargo run --release --example gpt`

use std::thread;

use allstream::{Comm, SharedComm};
use allstream_candle::{DataParallel, Options};
use candle_core::{D, DType, Device, Error, Module, Result, Tensor};
use candle_nn::{
    Embedding, LayerNorm, Linear, Optimizer, SGD, VarBuilder, VarMap, embedding, layer_norm_no_bias, linear,
    linear_no_bias, loss, ops,
};

const TEXT: &str = include_str!("../../../LICENSE-APACHE");
const BATCH: usize = 8;
const STEPS: usize = 100;
/// The learning rate.
const RATE: f64 = 0.15;

/// How large a model is.
#[derive(Clone, Copy)]
pub struct Size {
    /// How many characters it sees at once.
    pub context: usize,
    pub width: usize,
    pub heads: usize,
    pub blocks: usize,
}

/// The size of the model that this example trains.
pub const SMALL: Size = Size { context: 32, width: 32, heads: 2, blocks: 2 };

/// What a rank has when it has trained.
pub struct Trained {
    /// The weights, by name.
    pub weights: Vec<(String, Tensor)>,
    /// The mean loss of this rank's part of the batch, by step.
    pub losses: Vec<f32>,
}

struct Block {
    norms: [LayerNorm; 2],
    heads: usize,
    queries_keys_values: Linear,
    output: Linear,
    wide: Linear,
    narrow: Linear,
}

impl Block {
    fn new(Size { width, heads, .. }: Size, vb: VarBuilder) -> Result<Block> {
        // A norm with a bias would be computed by a kernel of candle's that has no gradient.
        let norm = |name| layer_norm_no_bias(width, 1e-5, vb.pp(name));
        Ok(Block {
            norms: [norm("norm_1")?, norm("norm_2")?],
            heads,
            queries_keys_values: linear_no_bias(width, 3 * width, vb.pp("queries_keys_values"))?,
            output: linear_no_bias(width, width, vb.pp("output"))?,
            wide: linear(width, 4 * width, vb.pp("wide"))?,
            narrow: linear(4 * width, width, vb.pp("narrow"))?,
        })
    }

    fn forward(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let x = (self.attention(&self.norms[0].forward(x)?, mask)? + x)?;
        let wide = self.wide.forward(&self.norms[1].forward(&x)?)?.gelu()?;
        self.narrow.forward(&wide)? + x
    }

    fn attention(&self, x: &Tensor, mask: &Tensor) -> Result<Tensor> {
        let (batch, length, width) = x.dims3()?;
        let each = width / self.heads;
        let all = self.queries_keys_values.forward(x)?.reshape((batch, length, 3, self.heads, each))?;
        let part = |i: usize| all.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (queries, keys, values) = (part(0)?, part(1)?, part(2)?);
        let scores = (queries.matmul(&keys.t()?.contiguous()?)? / (each as f64).sqrt())?;
        let weights = ops::softmax(&scores.broadcast_add(mask)?, D::Minus1)?;
        let y = weights.matmul(&values)?.transpose(1, 2)?.reshape((batch, length, width))?;
        self.output.forward(&y)
    }
}

/// The model: an embedding, [`blocks`](Self::blocks), and an end that gives the loss.
pub struct Gpt {
    tokens: Embedding,
    positions: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    width: usize,
    /// Added to attention scores: 0 where a character may attend to another one, and -1e9 where that other one comes later.
    mask: Tensor,
}

impl Gpt {
    pub fn new(size: Size, characters: usize, vars: &VarMap) -> Result<Gpt> {
        let vb = VarBuilder::from_varmap(vars, DType::F32, &Device::Cpu);
        let Size { context, width, blocks, .. } = size;
        let mask = (0..context * context).map(|i| if i % context > i / context { -1e9f32 } else { 0.0 });
        Ok(Gpt {
            tokens: embedding(characters, width, vb.pp("tokens"))?,
            positions: embedding(context, width, vb.pp("positions"))?,
            blocks: (0..blocks)
                .map(|i| Block::new(size, vb.pp(format!("block_{i}"))))
                .collect::<Result<_>>()?,
            norm: layer_norm_no_bias(width, 1e-5, vb.pp("norm"))?,
            width,
            mask: Tensor::from_iter(mask, &Device::Cpu)?.reshape((context, context))?,
        })
    }

    pub fn blocks(&self) -> usize {
        self.blocks.len()
    }

    /// The first segment.
    pub fn embed(&self, inputs: &Tensor) -> Result<Tensor> {
        self.tokens.forward(inputs)?.broadcast_add(self.positions.embeddings())
    }

    /// A segment in the middle.
    pub fn block(&self, i: usize, x: &Tensor) -> Result<Tensor> {
        self.blocks[i].forward(x, &self.mask)
    }

    /// The last segment.
    pub fn end(&self, x: &Tensor, targets: &Tensor) -> Result<Tensor> {
        let x = self.norm.forward(x)?.reshape(((), self.width))?;
        let logits = x.matmul(&self.tokens.embeddings().t()?)?;
        loss::cross_entropy(&logits, &targets.flatten_all()?)
    }

    /// The loss of a batch. `cut` is called with the output of the embedding and of each block: there one segment ends if the model is
    /// trained in [`Segments`].
    ///
    /// [`Segments`]: allstream_candle::Segments
    fn loss(
        &self,
        inputs: &Tensor,
        targets: &Tensor,
        mut cut: impl FnMut(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        let mut x = cut(&self.embed(inputs)?)?;
        for i in 0..self.blocks() {
            x = cut(&self.block(i, &x)?)?;
        }
        self.end(&x, targets)
    }
}

/// The text, with a number for each character, and how many different characters it has.
pub fn characters() -> Result<(Vec<u32>, usize)> {
    let mut all: Vec<u8> = TEXT.bytes().collect();
    all.sort_unstable();
    all.dedup();
    let number =
        |byte| all.binary_search(&byte).map(|i| i as u32).map_err(|_| Error::Msg("no such character".into()));
    Ok((TEXT.bytes().map(number).collect::<Result<_>>()?, all.len()))
}

/// Sets all variables but the norms' to numbers that look random and are the same in every run. Candle's own differ from run to run.
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

/// A row for each start: the `length` characters of the text that begin `shift` characters after it.
pub fn rows(
    text: &[u32],
    starts: impl ExactSizeIterator<Item = usize>,
    length: usize,
    shift: usize,
) -> Result<Tensor> {
    let n = starts.len();
    let rows = starts.flat_map(|at| text[at + shift..at + shift + length].iter().copied());
    Tensor::from_iter(rows, &Device::Cpu)?.reshape((n, length))
}

/// The inputs of rank `rank` of `ranks` in a step, and its targets: the same sequences, one character later. All ranks together
/// have the same sequences in a step, whatever the number of ranks.
fn batch(text: &[u32], step: usize, rank: usize, ranks: usize) -> Result<[Tensor; 2]> {
    let part = BATCH / ranks;
    let starts = (0..part).map(|i| (step * BATCH + rank * part + i) * 97 % (text.len() - SMALL.context - 1));
    let from = |shift| rows(text, starts.clone(), SMALL.context, shift);
    Ok([from(0)?, from(1)?])
}

fn trained(vars: &VarMap, losses: Vec<f32>) -> Trained {
    let vars = vars.data().lock().unwrap();
    let weights = vars.iter().map(|(name, var)| (name.clone(), var.as_detached_tensor())).collect();
    Trained { weights, losses }
}

/// Trains as one rank of `comm`, on its part of every batch, for `steps` steps. `options` are those of [`DataParallel::with`].
pub fn train(comm: &SharedComm, steps: usize, options: Options) -> Result<Trained> {
    let (text, different) = characters()?;
    let vars = VarMap::new();
    let model = Gpt::new(SMALL, different, &vars)?;
    if comm.rank() == 0 {
        start(&vars)?;
    }
    let mut parallel = DataParallel::with(comm, &vars, options)?;
    let mut optimizer = SGD::new(vars.all_vars(), RATE)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let [inputs, targets] = batch(&text, step, comm.rank(), comm.size())?;
        let mut segments = parallel.segments();
        let loss = model.loss(&inputs, &targets, |x| segments.cut(x))?;
        let grads = segments.backward(&loss)?;
        optimizer.step(&grads)?;
        losses.push(loss.to_scalar()?);
    }
    parallel.compare()?;
    parallel.close()?;
    Ok(trained(&vars, losses))
}

/// The same training on whole batches by candle alone, without ranks and without cuts.
pub fn train_alone(steps: usize) -> Result<Trained> {
    let (text, different) = characters()?;
    let vars = VarMap::new();
    let model = Gpt::new(SMALL, different, &vars)?;
    start(&vars)?;
    let mut optimizer = SGD::new(vars.all_vars(), RATE)?;
    let mut losses = Vec::new();
    for step in 0..steps {
        let [inputs, targets] = batch(&text, step, 0, 1)?;
        let loss = model.loss(&inputs, &targets, |x| Ok(x.clone()))?;
        optimizer.step(&loss.backward()?)?;
        losses.push(loss.to_scalar()?);
    }
    Ok(trained(&vars, losses))
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let alone = train_alone(STEPS)?;
    for n in [2, 4] {
        let spawn = |comm: Comm| thread::spawn(move || train(&comm.share(), STEPS, Options::default()));
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
