//! Figures out of what programs wrote.

use serde_json::Value;

use super::what::{Case, Collective, Form, Time};

/// Lines `time COLLECTIVE FORM RANKS BYTES MICROSECONDS`; what else is written there is nobody's.
pub(crate) fn lines(text: &str) -> Vec<Time> {
    text.lines().filter_map(line).collect()
}

fn line(line: &str) -> Option<Time> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ["time", collective, form, ranks, bytes, us] = words[..] else { return None };
    let form = Form::ALL.into_iter().find(|known| known.name() == form)?;
    let case = Case {
        collective: Collective::named(collective)?,
        form,
        ranks: ranks.parse().ok()?,
        bytes: bytes.parse().ok()?,
    };
    valid(case, us.parse().ok()?)
}

fn valid(case: Case, us: f64) -> Option<Time> {
    (us.is_finite() && us > 0.0).then_some(Time { case, us })
}

/// The file of `allstream perf -J`: one of its times of the forms that are compared.
pub(crate) fn perf(text: &str, field: &str) -> Result<Vec<Time>, String> {
    let report: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    let collective = report["collective"].as_str().and_then(Collective::named);
    let collective = collective.ok_or_else(|| format!("collective: found {}", report["collective"]))?;
    let ranks = report["ranks"].as_u64().and_then(|ranks| usize::try_from(ranks).ok());
    let ranks = ranks.ok_or_else(|| format!("ranks: found {}", report["ranks"]))?;
    let series = report["series"].as_array().ok_or("no series")?;
    let mut times = Vec::new();
    for row in series.iter().filter_map(|series| series["rows"].as_array()).flatten() {
        let bytes = row["size"].as_u64().ok_or_else(|| format!("size: found {}", row["size"]))?;
        for &form in collective.forms() {
            let us = row[form.name()][field].as_f64();
            let time = us.and_then(|us| valid(Case { collective, form, ranks, bytes }, us));
            times.push(time.ok_or_else(|| format!("{bytes} bytes {}: no time", form.words()))?);
        }
    }
    Ok(times)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(collective: Collective, form: Form, ranks: usize, bytes: u64, us: f64) -> Time {
        Time { case: Case { collective, form, ranks, bytes }, us }
    }

    #[test]
    fn lines_that_are_no_times_are_passed_over() {
        let text = "[host] a warning\ntime all_reduce in_place 4 1024 5.25\ntime reduce out_of_place 2 4 nan\n\
                    time gather in_place 2 4 1.0\ntime all_to_all out_of_place 2 8 0.5\ntime reduce in_place 2 4";
        assert_eq!(
            lines(text),
            [
                time(Collective::AllReduce, Form::InPlace, 4, 1024, 5.25),
                time(Collective::AllToAll, Form::OutOfPlace, 2, 8, 0.5)
            ]
        );
    }

    #[test]
    fn perf_gives_the_forms_that_are_compared() {
        let report = |collective: &str| {
            format!(
                "{{\"collective\": \"{collective}\", \"ranks\": 2, \"series\": [{{\"rows\": [{{\"size\": 4, \
                 \"out_of_place\": {{\"median_us\": 2.5}}, \"in_place\": {{\"median_us\": 1.5}}}}]}}]}}"
            )
        };
        let in_place = |collective| time(collective, Form::InPlace, 2, 4, 1.5);
        let perf = |text: &str| super::perf(text, "median_us");
        assert_eq!(perf(&report("all_reduce")), Ok(vec![in_place(Collective::AllReduce)]));
        let both = vec![time(Collective::Reduce, Form::OutOfPlace, 2, 4, 2.5), in_place(Collective::Reduce)];
        assert_eq!(perf(&report("reduce")), Ok(both));
        assert!(perf(&report("gather")).unwrap_err().contains("gather"));
        assert!(perf(&report("reduce").replace("2.5", "null")).unwrap_err().contains("4 bytes out of place"));
        assert!(perf("{").is_err());
    }
}
