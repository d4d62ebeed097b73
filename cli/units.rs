//! Sizes and rates as they are written on the command line, and the factor from nccl-tests' algbw to its busbw.

use allstream::Kind;
use parse_size::{ByteSuffix, Config};

/// Bytes, where K, M and G are powers of 1024.
pub(crate) fn size(text: &str) -> Result<u64, String> {
    Config::new().with_binary().parse_size(text).map_err(|e| e.to_string())
}

/// Bytes a second, where K, M and G are powers of 1000.
pub(crate) fn rate(text: &str) -> Result<f64, String> {
    let bytes = text.strip_suffix("/s").ok_or("expected bytes a second, such as 25GB/s")?;
    let decimal = Config::new().with_decimal().with_byte_suffix(ByteSuffix::Require);
    decimal.parse_size(bytes).map(|bytes| bytes as f64).map_err(|e| e.to_string())
}

/// What nccl-tests multiplies the algorithm's bandwidth by, so that the product compares with the bandwidth of the hardware.
pub(crate) fn bus_factor(kind: Kind, n: usize) -> f64 {
    let n = n as f64;
    match kind {
        Kind::AllReduce => 2.0 * (n - 1.0) / n,
        Kind::AllGather | Kind::ReduceScatter | Kind::AllToAll | Kind::Gather | Kind::Scatter => {
            (n - 1.0) / n
        }
        _ => 1.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_and_rates_are_read() {
        assert_eq!(size("1G"), Ok(1 << 30));
        assert_eq!(size("4K"), Ok(4096));
        assert_eq!(size("100"), Ok(100));
        assert_eq!(rate("25GB/s"), Ok(25e9));
        assert!(rate("25").is_err() && rate("25GB").is_err());
    }
}
