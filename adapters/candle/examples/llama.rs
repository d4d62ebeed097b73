//! A Llama divided over two ranks, which generates the same tokens as candle-transformers' Llama in one process.
//!
//! Teaches: heads and the hidden units of the MLP are divided among ranks. A layer that reads the same input on all ranks is a
//! `ColumnParallelLinear`; a layer that sums over all heads or units is a `RowParallelLinear`. There are two all-reduces a block. The model
//! is tiny and its weights are random.
//!
//! `cargo run --release --example llama`

use std::collections::HashMap;
use std::thread;

use allstream::{Comm, SharedComm};
use allstream_candle::{ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding, shard};
use candle_core::{D, DType, Device, Module, Result, Tensor};
use candle_nn::{RmsNorm, VarBuilder, ops, rotary_emb};
use candle_transformers::models::llama::{Cache, Config, Llama};

const LAYERS: usize = 2;
const HEADS: usize = 4;
const WIDTH: usize = 32;
const HEAD: usize = WIDTH / HEADS;
const HIDDEN: usize = 64;
const VOCABULARY: usize = 48;
const POSITIONS: usize = 64;
const THETA: f32 = 10_000.0;
const EPS: f64 = 1e-5;
const PROMPT: [u32; 4] = [7, 3, 31, 18];
const NEW_TOKENS: usize = 24;

type Weights = HashMap<String, Tensor>;

/// The weights of the whole model, by the names that candle-transformers gives them. They are the same in every run.
fn weights() -> Result<Weights> {
    let mut all: Vec<(String, Vec<usize>)> = vec![
        ("model.embed_tokens".into(), vec![VOCABULARY, WIDTH]),
        ("lm_head".into(), vec![VOCABULARY, WIDTH]),
        ("model.norm".into(), vec![WIDTH]),
    ];
    for i in 0..LAYERS {
        let mut add =
            |name: &str, shape: &[usize]| all.push((format!("model.layers.{i}.{name}"), shape.into()));
        ["q_proj", "k_proj", "v_proj", "o_proj"]
            .iter()
            .for_each(|name| add(&format!("self_attn.{name}"), &[WIDTH, WIDTH]));
        ["gate_proj", "up_proj"].iter().for_each(|name| add(&format!("mlp.{name}"), &[HIDDEN, WIDTH]));
        add("mlp.down_proj", &[WIDTH, HIDDEN]);
        ["input_layernorm", "post_attention_layernorm"].iter().for_each(|name| add(name, &[WIDTH]));
    }
    let mut state = 1u32;
    let mut made = Weights::new();
    for (name, shape) in all {
        let values = (0..shape.iter().product()).map(|_: usize| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 24) as f32 - 0.5
        });
        let values = Tensor::from_iter(values, &Device::Cpu)?.reshape(shape.as_slice())?;
        made.insert(format!("{name}.weight"), if shape.len() == 1 { (values + 1.0)? } else { values });
    }
    Ok(made)
}

/// The most likely token after the last one.
fn next(logits: &Tensor) -> Result<u32> {
    logits.flatten_all()?.argmax(0)?.to_scalar()
}

/// What candle-transformers' model generates in one process.
pub fn in_one_process() -> Result<Vec<u32>> {
    let config = Config {
        hidden_size: WIDTH,
        intermediate_size: HIDDEN,
        vocab_size: VOCABULARY,
        num_hidden_layers: LAYERS,
        num_attention_heads: HEADS,
        num_key_value_heads: HEADS,
        use_flash_attn: false,
        rms_norm_eps: EPS,
        rope_theta: THETA,
        bos_token_id: None,
        eos_token_id: None,
        rope_scaling: None,
        max_position_embeddings: POSITIONS,
        tie_word_embeddings: false,
    };
    let model = Llama::load(VarBuilder::from_tensors(weights()?, DType::F32, &Device::Cpu), &config)?;
    let mut tokens = PROMPT.to_vec();
    for _ in 0..NEW_TOKENS {
        let mut cache = Cache::new(false, DType::F32, &config, &Device::Cpu)?;
        let input = Tensor::new(tokens.as_slice(), &Device::Cpu)?.unsqueeze(0)?;
        tokens.push(next(&model.forward(&input, 0, &mut cache)?)?);
    }
    Ok(tokens)
}

/// Loads the parts of the weights that a rank needs.
struct Loader<'a> {
    weights: &'a Weights,
    comm: &'a SharedComm,
}

impl Loader<'_> {
    fn whole(&self, name: &str) -> Result<Tensor> {
        let missing = || candle_core::Error::CannotFindTensor { path: name.into() };
        self.weights.get(&format!("{name}.weight")).cloned().ok_or_else(missing)
    }
    fn norm(&self, name: &str) -> Result<RmsNorm> {
        Ok(RmsNorm::new(self.whole(name)?, EPS))
    }
    fn column(&self, name: &str) -> Result<ColumnParallelLinear> {
        ColumnParallelLinear::new(shard(&self.whole(name)?, 0, self.comm)?, None, self.comm)
    }
    fn row(&self, name: &str) -> Result<RowParallelLinear> {
        RowParallelLinear::new(shard(&self.whole(name)?, 1, self.comm)?, None, self.comm)
    }
}

struct Block {
    norms: [RmsNorm; 2],
    queries: ColumnParallelLinear,
    keys: ColumnParallelLinear,
    values: ColumnParallelLinear,
    output: RowParallelLinear,
    gate: ColumnParallelLinear,
    up: ColumnParallelLinear,
    down: RowParallelLinear,
}

impl Block {
    fn load(from: &Loader<'_>, i: usize) -> Result<Block> {
        let name = |part: &str| format!("model.layers.{i}.{part}");
        Ok(Block {
            norms: [from.norm(&name("input_layernorm"))?, from.norm(&name("post_attention_layernorm"))?],
            queries: from.column(&name("self_attn.q_proj"))?,
            keys: from.column(&name("self_attn.k_proj"))?,
            values: from.column(&name("self_attn.v_proj"))?,
            output: from.row(&name("self_attn.o_proj"))?,
            gate: from.column(&name("mlp.gate_proj"))?,
            up: from.column(&name("mlp.up_proj"))?,
            down: from.row(&name("mlp.down_proj"))?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = (self.attention(&self.norms[0].forward(x)?)? + x)?;
        let y = self.norms[1].forward(&x)?;
        let y = (ops::silu(&self.gate.forward(&y)?)? * self.up.forward(&y)?)?;
        self.down.forward(&y)? + x
    }

    /// Attention of this rank's heads, and the sum over all heads of all ranks.
    fn attention(&self, x: &Tensor) -> Result<Tensor> {
        let (batch, length, _) = x.dims3()?;
        let heads = |y: Tensor| y.reshape((batch, length, (), HEAD))?.transpose(1, 2)?.contiguous();
        let (cos, sin) = rotation(length)?;
        let queries = rotary_emb::rope(&heads(self.queries.forward(x)?)?, &cos, &sin)?;
        let keys = rotary_emb::rope(&heads(self.keys.forward(x)?)?, &cos, &sin)?;
        let values = heads(self.values.forward(x)?)?;
        let later =
            (0..length * length).map(|i| if i % length > i / length { f32::NEG_INFINITY } else { 0.0 });
        let mask = Tensor::from_iter(later, &Device::Cpu)?.reshape((length, length))?;
        let scores = (queries.matmul(&keys.t()?)? / (HEAD as f64).sqrt())?.broadcast_add(&mask)?;
        let y = ops::softmax(&scores, D::Minus1)?.matmul(&values)?;
        self.output.forward(&y.transpose(1, 2)?.reshape((batch, length, ()))?)
    }
}

/// Cosines and sines of the rotary embedding of the first `length` positions.
fn rotation(length: usize) -> Result<(Tensor, Tensor)> {
    let frequencies = (0..HEAD).step_by(2).map(|i| 1.0 / THETA.powf(i as f32 / HEAD as f32));
    let frequencies = Tensor::from_iter(frequencies, &Device::Cpu)?.reshape((1, ()))?;
    let positions =
        Tensor::arange(0, length as u32, &Device::Cpu)?.to_dtype(DType::F32)?.reshape((length, 1))?;
    let angles = positions.matmul(&frequencies)?;
    Ok((angles.cos()?, angles.sin()?))
}

/// The tokens that the ranks of `comm` generate together. All ranks get the same.
pub fn generate(comm: &SharedComm) -> Result<Vec<u32>> {
    let weights = weights()?;
    let from = Loader { weights: &weights, comm };
    let embedding = VocabParallelEmbedding::new(shard(&from.whole("model.embed_tokens")?, 0, comm)?, comm)?;
    let blocks: Vec<Block> = (0..LAYERS).map(|i| Block::load(&from, i)).collect::<Result<_>>()?;
    let (norm, head) = (from.norm("model.norm")?, from.column("lm_head")?.gather_output());
    let mut tokens = PROMPT.to_vec();
    for _ in 0..NEW_TOKENS {
        let input = Tensor::new(tokens.as_slice(), &Device::Cpu)?.unsqueeze(0)?;
        let x = embedding.forward(&input)?;
        let x = blocks.iter().try_fold(x, |x, block| block.forward(&x))?;
        let last = norm.forward(&x)?.narrow(1, tokens.len() - 1, 1)?;
        tokens.push(next(&head.forward(&last)?)?);
    }
    Ok(tokens)
}

fn main() -> std::result::Result<(), Box<dyn std::error::Error>> {
    let spawn = |comm: Comm| thread::spawn(move || generate(&comm.share()));
    let ranks: Vec<_> = Comm::local(2)?.into_iter().map(spawn).collect();
    println!("one process: {:?}", in_one_process()?);
    for (rank, thread) in ranks.into_iter().enumerate() {
        println!("rank {rank} of 2: {:?}", thread.join().map_err(|_| "a rank panicked")??);
    }
    Ok(())
}
