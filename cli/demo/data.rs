//! The data set: 1,797 handwritten digits, compiled into the binary (see `data/README.md`).

use std::fmt;

/// Pixels of one image, 8x8.
pub(crate) const PIXELS: usize = 64;
/// Number of classes, the digits 0 to 9.
pub(crate) const CLASSES: usize = 10;

/// One row in this many is held out for testing.
const HELD_OUT: usize = 5;
/// The darkest pixel's value in the data set. Pixels are divided by it, which gives 0..=1.
const DARKEST: u8 = 16;

const TEXT: &str = include_str!("../data/digits.txt");

/// One image and what it shows.
#[derive(Clone, Debug)]
pub(crate) struct Digit {
    /// How dark each pixel is, row by row: 0 (white) to 1.
    pub(crate) pixels: [f32; PIXELS],
    /// The digit shown, below [`CLASSES`].
    pub(crate) label: usize,
}

/// The rows to train on and the rows to test with; no row is in both.
#[derive(Debug)]
pub(crate) struct Split {
    /// Four fifths of the rows.
    pub(crate) train: Vec<Digit>,
    /// Every fifth row.
    pub(crate) test: Vec<Digit>,
}

/// The error for a line of the data set that does not describe a digit.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct BadLine {
    /// The line's number, from 1.
    line: usize,
    problem: Problem,
}

#[derive(Debug, PartialEq, Eq)]
enum Problem {
    NoSpace,
    Label(String),
    Pixels(usize),
    Pixel(char),
}

impl fmt::Display for BadLine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "data set, line {}: ", self.line)?;
        match &self.problem {
            Problem::NoSpace => f.write_str("expected a label, a space and the pixels"),
            Problem::Label(text) => write!(f, "label {text:?} is not a digit 0-9"),
            Problem::Pixels(n) => write!(f, "{n} pixels instead of {PIXELS}"),
            Problem::Pixel(c) => write!(f, "pixel {c:?} is not one of 0-9a-g"),
        }
    }
}

impl std::error::Error for BadLine {}

/// The data set that ships with the program, split the same way every time.
pub(crate) fn load() -> Result<Split, BadLine> {
    parse(TEXT).map(split)
}

/// Reads digits, one a line; empty lines and lines that start with `#` are skipped.
fn parse(text: &str) -> Result<Vec<Digit>, BadLine> {
    text.lines()
        .enumerate()
        .filter(|(_, line)| !line.is_empty() && !line.starts_with('#'))
        .map(|(index, line)| parse_line(line).map_err(|problem| BadLine { line: index + 1, problem }))
        .collect()
}

fn parse_line(line: &str) -> Result<Digit, Problem> {
    let (label, image) = line.split_once(' ').ok_or(Problem::NoSpace)?;
    let label = match label.parse() {
        Ok(class) if class < CLASSES => class,
        _ => return Err(Problem::Label(label.to_owned())),
    };
    let count = image.chars().count();
    if count != PIXELS {
        return Err(Problem::Pixels(count));
    }
    let mut pixels = [0.0; PIXELS];
    for (pixel, c) in pixels.iter_mut().zip(image.chars()) {
        *pixel = brightness(c).ok_or(Problem::Pixel(c))?;
    }
    Ok(Digit { pixels, label })
}

/// How dark a pixel is, from 0 to 1, by its digit in base 17. `None`: `c` is no such digit.
fn brightness(c: char) -> Option<f32> {
    let level = c.to_digit(u32::from(DARKEST) + 1)?;
    let level = u8::try_from(level).ok()?;
    Some(f32::from(level) / f32::from(DARKEST))
}

fn split(digits: Vec<Digit>) -> Split {
    let mut split = Split { train: Vec::new(), test: Vec::new() };
    for (index, digit) in digits.into_iter().enumerate() {
        if index % HELD_OUT == 0 {
            split.test.push(digit);
        } else {
            split.train.push(digit);
        }
    }
    split
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ships_whole() {
        let digits = parse(TEXT).unwrap();
        assert_eq!(digits.len(), 1797);
        let mut counts = [0; CLASSES];
        for digit in &digits {
            counts[digit.label] += 1;
        }
        assert_eq!(counts, [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]);
        let values = digits.iter().flat_map(|d| d.pixels);
        assert!(values.clone().all(|p| (0.0..=1.0).contains(&p)));
        // The sum of all pixels in the source's file, in sixteenths: no pixel was lost on the way.
        let sum: f32 = digits.iter().map(|d| d.pixels.iter().sum::<f32>() * 16.0).sum();
        assert_eq!(sum, 561_718.0);
    }

    #[test]
    fn splits_every_row_once() {
        let split = load().unwrap();
        assert_eq!((split.train.len(), split.test.len()), (1437, 360));
        for class in 0..CLASSES {
            let held_out = split.test.iter().filter(|d| d.label == class).count();
            assert!(held_out >= 20, "class {class}: only {held_out} test rows");
        }
    }

    #[test]
    fn says_what_is_wrong_where() {
        let zeros = "0".repeat(PIXELS);
        let message = |line: &str| parse(&format!("# head\n\n{line}\n")).unwrap_err().to_string();
        assert_eq!(message("7"), "data set, line 3: expected a label, a space and the pixels");
        assert_eq!(message(&format!("10 {zeros}")), "data set, line 3: label \"10\" is not a digit 0-9");
        assert_eq!(message("1 000"), "data set, line 3: 3 pixels instead of 64");
        assert_eq!(
            message(&format!("1 h{}", &zeros[1..])),
            "data set, line 3: pixel 'h' is not one of 0-9a-g"
        );
        assert_eq!(parse(&format!("1 {zeros}")).unwrap().len(), 1);
    }
}
