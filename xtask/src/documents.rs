//! Checks the documents against the repository: the files and headings that links lead to, and the functions and tests that the text names.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use pulldown_cmark::{Event, Options, Parser, Tag, TagEnd};

use crate::files::SourceFile;

/// The history names functions that no longer exist, so its names are not checked.
const HISTORY: &str = "CHANGELOG.md";
/// A word is taken for the name of a test or function if it has at least this many underscores or stars. Shorter names may be another project's.
const UNDERSCORES: usize = 3;
/// Names that are not this project's: counters of network cards.
const ELSEWHERE: [&str; 2] = ["local_ack_timeout_err", "rnr_nak_retry_err"];

/// A document: the names by which links find its headings, where its own links lead, and its words in `code`.
#[derive(Default)]
pub(crate) struct Document {
    headings: BTreeSet<String>,
    links: Vec<String>,
    code: Vec<String>,
}

fn read(text: &str) -> Document {
    let mut document = Document::default();
    let mut heading: Option<String> = None;
    for event in Parser::new_ext(text, Options::ENABLE_TABLES) {
        match event {
            Event::Start(Tag::Heading { .. }) => heading = Some(String::new()),
            Event::End(TagEnd::Heading(_)) => {
                document.headings.extend(heading.take().map(|text| anchor(&text)));
            }
            Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                document.links.push(dest_url.into_string());
            }
            Event::Text(text) | Event::Code(text) if heading.is_some() => {
                heading.get_or_insert_default().push_str(&text);
            }
            Event::Code(text) => document.code.push(text.into_string()),
            _ => {}
        }
    }
    document
}

/// The anchor by which links name a heading, made as web sites that show repositories make it.
fn anchor(heading: &str) -> String {
    let kept = heading.to_lowercase();
    let kept = kept.chars().filter(|char| char.is_alphanumeric() || matches!(char, ' ' | '-' | '_'));
    kept.map(|char| if char == ' ' { '-' } else { char }).collect()
}

/// All documents, by their paths.
pub(crate) fn all(files: &[SourceFile]) -> BTreeMap<&str, Document> {
    let documents = files.iter().filter(|file| file.path.ends_with(".md"));
    documents.map(|file| (file.path.as_str(), read(&file.text))).collect()
}

/// Links within the repository that lead to no file, or to a heading that the file does not have.
pub(crate) fn links(root: &Path, documents: &BTreeMap<&str, Document>) -> Vec<String> {
    let mut complaints = Vec::new();
    for (path, document) in documents {
        let is_ours = |link: &&String| !link.contains("://") && !link.starts_with("mailto:");
        for link in document.links.iter().filter(is_ours) {
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() { PathBuf::from(path) } else { beside(path, file) };
            let has = |other: &Document| heading.is_empty() || other.headings.contains(heading);
            let leads = match documents.get(&*target.to_string_lossy()) {
                Some(other) => has(other),
                None => root.join(&target).exists(),
            };
            if !leads {
                complaints.push(format!("{path}: `{link}` leads nowhere"));
            }
        }
    }
    complaints
}

/// The path from the repository's root, for a path that a document gives relative to its own folder.
fn beside(document: &str, path: &str) -> PathBuf {
    let mut from_root = PathBuf::from(document);
    from_root.pop();
    for part in Path::new(path).components() {
        match part {
            Component::ParentDir => _ = from_root.pop(),
            Component::Normal(name) => from_root.push(name),
            _ => {}
        }
    }
    from_root
}

/// Names of tests and functions in documents that no source file has. `law_1_*` stands for all names that begin with `law_1_`.
pub(crate) fn names(files: &[SourceFile], documents: &BTreeMap<&str, Document>) -> Vec<String> {
    let sources = files.iter().filter(|file| !file.path.ends_with(".md"));
    let known: BTreeSet<&str> = sources.flat_map(|file| file.text.split(|char| !is_of_name(char))).collect();
    // Known without a star, too, if a name begins with it: `cargo test` takes the beginning of a name as a filter.
    let is_known = |name: &str| {
        let start = name.strip_suffix('*').unwrap_or(name);
        known.range(start..).next().is_some_and(|first| first.starts_with(start))
    };
    let mut complaints = Vec::new();
    for (path, document) in documents.iter().filter(|(path, _)| **path != HISTORY) {
        for code in &document.code {
            for name in code.split(|char| !(is_of_name(char) || char == '*')) {
                let is_name = name.chars().next().is_some_and(|first| first.is_ascii_lowercase())
                    && !name.contains(|char: char| char.is_ascii_uppercase())
                    && name.matches(['_', '*']).count() >= UNDERSCORES;
                if is_name && !is_known(name) && !ELSEWHERE.contains(&name) {
                    complaints.push(format!("{path}: no source has `{name}`"));
                }
            }
        }
    }
    complaints
}

fn is_of_name(char: char) -> bool {
    char.is_ascii_alphanumeric() || char == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, text: &str) -> SourceFile {
        SourceFile { path: path.into(), text: text.into() }
    }

    #[test]
    fn links_that_lead_nowhere_are_found() {
        // This directory does not exist, so links can only lead to the files below.
        let root = Path::new("there/is/no/such/directory");
        let files = [
            file(
                "docs/a.md",
                "# One `two`, three\n[b](b.md) [h](#one-two-three) [up](../README.md#top) <https://a.b/c>\n",
            ),
            file("docs/b.md", "[gone](c.md) [no heading](a.md#two)\n```\n[not a link](d.md)\n```\n"),
            file("README.md", "## Top\n"),
        ];
        let found = links(root, &all(&files));
        assert_eq!(found, ["docs/b.md: `c.md` leads nowhere", "docs/b.md: `a.md#two` leads nowhere"]);
    }

    #[test]
    fn names_that_no_source_has_are_found() {
        let files = [
            file("a.rs", "fn law_1_calls_submit() {} fn every_plan_is_right() {}"),
            file("b.md", "`law_1_*` `every_plan_is` `engine::every_plan_is_right` `a_b` `A_B_C_D_E`"),
            file("c.md", "`law_2_*`, `cargo test every_plan_was_right`"),
            file("CHANGELOG.md", "`this_was_there_once`"),
        ];
        let expected = ["c.md: no source has `law_2_*`", "c.md: no source has `every_plan_was_right`"];
        assert_eq!(names(&files, &all(&files)), expected);
    }
}
