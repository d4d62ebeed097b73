//! Pairwise testing: rows that together contain every pair of values of every two factors, chosen greedily.

/// Rows over factors with `sizes` values each: every allowed pair of values is in some row. `allowed` is called with rows that are
/// only partly filled. Of values that add equally many new pairs, the one of least `cost` is taken, and among equal costs they take
/// turns. Deterministic.
pub fn pairwise(
    sizes: &[usize],
    allowed: impl Fn(&[Option<usize>]) -> bool,
    cost: impl Fn(usize, usize) -> u32,
) -> Vec<Vec<usize>> {
    let mut pairs = Pairs::new(sizes);
    let mut rows: Vec<Vec<usize>> = Vec::new();
    for a in 0..sizes.len() {
        for b in a + 1..sizes.len() {
            for (x, y) in (0..sizes[a]).flat_map(|x| (0..sizes[b]).map(move |y| (x, y))) {
                if pairs.seen(a, x, b, y) {
                    continue;
                }
                let mut row = vec![None; sizes.len()];
                (row[a], row[b]) = (Some(x), Some(y));
                if !allowed(&row) {
                    continue;
                }
                for f in 0..sizes.len() {
                    if row[f].is_none() {
                        row[f] = Some(best(&pairs, &mut row, f, rows.len(), &allowed, &cost));
                    }
                }
                let row: Vec<usize> = row.into_iter().flatten().collect();
                pairs.add(&row);
                rows.push(row);
            }
        }
    }
    rows
}

fn best(
    pairs: &Pairs,
    row: &mut [Option<usize>],
    f: usize,
    turn: usize,
    allowed: &impl Fn(&[Option<usize>]) -> bool,
    cost: &impl Fn(usize, usize) -> u32,
) -> usize {
    let size = pairs.sizes[f];
    let values = (0..size).map(|k| (k + turn) % size).filter_map(|v| {
        row[f] = Some(v);
        let fits = allowed(row);
        row[f] = None;
        let fixed = row.iter().enumerate().filter_map(|(g, w)| w.map(|w| (g, w)));
        let gain = fixed.filter(|(g, w)| !pairs.seen(*g, *w, f, v)).count();
        fits.then_some((gain, cost(f, v), v))
    });
    // Of equally good values, the first is kept; `turn` decides which value comes first.
    let better = |a: (usize, u32, usize), b: (usize, u32, usize)| {
        if (b.0, std::cmp::Reverse(b.1)) > (a.0, std::cmp::Reverse(a.1)) { b } else { a }
    };
    values.reduce(better).expect("a value that fits").2
}

struct Pairs {
    sizes: Vec<usize>,
    starts: Vec<usize>,
    total: usize,
    seen: Vec<bool>,
}

impl Pairs {
    fn new(sizes: &[usize]) -> Pairs {
        let starts = sizes.iter().scan(0, |at, s| Some(std::mem::replace(at, *at + s))).collect();
        let total = sizes.iter().sum();
        Pairs { sizes: sizes.to_vec(), starts, total, seen: vec![false; total * total] }
    }

    fn at(&self, a: usize, x: usize, b: usize, y: usize) -> usize {
        let (p, q) = (self.starts[a] + x, self.starts[b] + y);
        p.min(q) * self.total + p.max(q)
    }

    fn seen(&self, a: usize, x: usize, b: usize, y: usize) -> bool {
        self.seen[self.at(a, x, b, y)]
    }

    fn add(&mut self, row: &[usize]) {
        for (a, x) in row.iter().enumerate() {
            for (b, y) in row.iter().enumerate().skip(a + 1) {
                let at = self.at(a, *x, b, *y);
                self.seen[at] = true;
            }
        }
    }
}
