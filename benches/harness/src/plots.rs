//! Plots of a record, as SVG.

use std::{collections::BTreeMap, fmt::Write as _};

use plotters::{
    coord::{Shift, ranged1d::ValueFormatter},
    prelude::{
        Cartesian2d, ChartBuilder, ChartContext, Circle, Color as _, DashedLineSeries, DrawingArea,
        IntoDrawingArea as _, IntoLogRange as _, LineSeries, LogCoord, PathElement, RGBColor, Ranged, SVGBackend,
        SeriesLabelPosition, ShapeStyle, WHITE,
    },
    style::{BLACK, IntoFont as _},
};

use crate::{
    Result,
    record::Record,
    report::{Figures, geometric_mean},
    results::{Added, Results},
    selection::{Chosen, Subject},
    workload::{Suite, Workload},
};

/// The model whose layers are shown.
pub const MODEL: &str = "qwen3-8b";

const PANEL: (u32, u32) = (560, 420);
const TITLE_HEIGHT: u32 = 56;
const FONT: &str = "sans-serif";

/// The layers of a decoder layer that adapters adapt, and the rank and adapters of plots.
const LAYERS: [&str; 4] = ["qkv", "o", "gate_up", "down"];
const RANK: usize = 16;
pub(crate) const ADAPTERS: usize = 8;

/// A plot of one or more panels, each of figures over numbers of tokens.
#[derive(Debug)]
pub struct Plot {
    pub file: &'static str,
    pub title: String,
    pub axis: Axis,
    /// The GPU and the commit.
    pub source: String,
    pub panels: Vec<Panel>,
}

/// What the axes show. The x axis is logarithmic.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Axis {
    /// Times in µs, which are positive, over tokens. Logarithmic.
    Time,
    /// LoRA's part of the time of the base GEMMs, in percent, over tokens. Linear, from the least figure or 0.
    Percent,
    /// LoRA's part of the time of a step, in percent, over sequences. Linear, from the least figure or 0.
    Overhead,
}

impl Axis {
    fn unit(self) -> &'static str {
        match self {
            Self::Time => "µs",
            Self::Percent | Self::Overhead => "percent",
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Time => "µs",
            Self::Percent => "% of the base GEMMs",
            Self::Overhead => "% of the step without adapters",
        }
    }

    fn x_label(self) -> &'static str {
        match self {
            Self::Time | Self::Percent => "tokens",
            Self::Overhead => "sequences",
        }
    }

    /// Where no line is: above the lines, or on the side of many tokens.
    fn legend(self) -> SeriesLabelPosition {
        match self {
            Self::Time | Self::Overhead => SeriesLabelPosition::UpperLeft,
            Self::Percent => SeriesLabelPosition::UpperRight,
        }
    }
}

#[derive(Debug)]
pub struct Panel {
    pub caption: String,
    pub lines: Vec<Line>,
}

/// A line of points: places on the x axis, and figures in the unit of the plot's axis.
#[derive(Debug)]
pub struct Line {
    pub name: String,
    pub kind: Kind,
    pub points: Vec<(f64, f64)>,
}

impl Line {
    pub fn new(name: &str, kind: Kind, points: Vec<(f64, f64)>) -> Self {
        Self { name: name.to_owned(), kind, points }
    }
}

#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Kind {
    Ours,
    /// An adapter for each sequence.
    OursEach,
    /// LoRA before the GEMM.
    OursFirst,
    /// The fused linear in place of the GEMM.
    OursFused,
    /// Behind the GEMM by W and the rows of a stack.
    OursStacked,
    Other,
    /// Another library that only writes deltas.
    OtherDeltas,
    Floor,
}

impl Kind {
    fn color(self) -> RGBColor {
        match self {
            Self::Ours => RGBColor(0, 90, 181),
            Self::OursEach => RGBColor(86, 160, 211),
            Self::OursFirst => RGBColor(120, 94, 190),
            Self::OursFused => RGBColor(0, 130, 95),
            Self::OursStacked => RGBColor(204, 80, 150),
            Self::Other => RGBColor(213, 94, 0),
            Self::OtherDeltas => RGBColor(230, 159, 0),
            Self::Floor => RGBColor(110, 110, 110),
        }
    }

    fn style(self) -> ShapeStyle {
        self.color().stroke_width(2)
    }
}

/// The plots of a record.
pub fn of(record: &Record, chosen: &Chosen) -> Result<Vec<Plot>> {
    Ok(vec![tokens(record, chosen)?, layer(record, chosen)?, experts(record, chosen)?])
}

/// Time against tokens of the layers of a decoder layer.
fn tokens(record: &Record, chosen: &Chosen) -> Result<Plot> {
    let figures = record.figures(chosen);
    let is_in = |subject: Subject<'_>| match subject {
        Subject::Layer(workload) => {
            matches!(workload.suite, Suite::Decode | Suite::Prefill)
                && is_plotted(workload, RANK)
                && uses_all_adapters(workload)
        }
        Subject::Experts(_) => false,
    };
    let figures: Vec<_> = figures.iter().filter(|(subject, _)| is_in(*subject)).collect();
    let points = |of| means(&figures, of);
    let lines = vec![
        Line::new("fastest other library", Kind::Other, points(|of| Some(of.fastest.as_ref()?.1))?),
        Line::new("aril", Kind::Ours, points(|of| Some(of.us))?),
        Line::new("floor of bytes", Kind::Floor, points(|of| Some(of.floor_us))?),
    ];
    Ok(Plot {
        file: "tokens.svg",
        title: format!("LoRA of one linear layer of Qwen3-8B, rank {RANK}, up to {ADAPTERS} adapters"),
        axis: Axis::Time,
        source: source(record, &record.linear),
        panels: vec![Panel { caption: "Mean of qkv, o, gate_up and down".to_owned(), lines }],
    })
}

/// What LoRA adds to the base GEMMs of a decoder layer, in percent of their time.
fn layer(record: &Record, chosen: &Chosen) -> Result<Plot> {
    let results = &record.layer;
    let rate = results.rate()?;
    let added = record.added(chosen);
    let panel = |rank: usize| -> Result<Panel> {
        let plotted: Vec<_> = added.iter().filter(|(workload, _)| is_plotted(workload, rank)).collect();
        let percent = |of: &dyn Fn(&Workload, &Added) -> Option<f64>| {
            percentages(plotted.iter().map(|(workload, added)| (*workload, of(workload, added), added.gemm_us)))
        };
        let mode = |name: &str| percent(&|_, added| added.added_us.get(name).copied());
        let lines = [
            ("aril, behind the GEMM", Kind::Ours, mode("after")?),
            ("aril, before the GEMM", Kind::OursFirst, mode("first")?),
            ("aril, fused linear", Kind::OursFused, mode("fused")?),
            ("aril, A as rows of W", Kind::OursStacked, mode("stacked")?),
            (
                "fastest other library",
                Kind::Other,
                percent(&|workload, _| record.others.least_added(workload).map(|(_, us)| us))?,
            ),
            ("floor of bytes", Kind::Floor, percent(&|workload, _| Some(workload.bytes().floor_us(rate)))?),
        ];
        // The fused linear, stacks and other libraries are not in every record.
        let lines = lines.into_iter().filter(|(.., points)| !points.is_empty());
        let lines = lines.map(|(name, kind, points)| Line::new(name, kind, points)).collect();
        Ok(Panel { caption: format!("Rank {rank}"), lines })
    };
    Ok(Plot {
        file: "layer.svg",
        title: format!("What LoRA adds to qkv, o, gate_up and down of Qwen3-8B, up to {ADAPTERS} adapters"),
        axis: Axis::Percent,
        source: source(record, results),
        panels: vec![panel(16)?, panel(64)?],
    })
}

/// Time against tokens of experts.
fn experts(record: &Record, chosen: &Chosen) -> Result<Plot> {
    let figures = record.figures(chosen);
    let panel = |layout: &str, caption: &str| -> Result<Panel> {
        let is_in = |subject: Subject<'_>| match subject {
            Subject::Experts(workload) => {
                let adapters = workload.adapters.len();
                workload.suite == Suite::Moe
                    && workload.tag == layout
                    && workload.max_rank() == RANK
                    && adapters == ADAPTERS.min(workload.num_tokens())
            }
            Subject::Layer(_) => false,
        };
        let figures: Vec<_> = figures.iter().filter(|(subject, _)| is_in(*subject)).collect();
        let points = |of| means(&figures, of);
        let other = points(|of| Some(of.fastest.as_ref()?.1))?;
        let less = points(|of| Some(of.deltas.as_ref()?.1))?;
        Ok(Panel {
            caption: caption.to_owned(),
            lines: vec![
                Line::new("fastest other that adds", Kind::Other, other),
                Line::new("fastest other, deltas only", Kind::OtherDeltas, less),
                Line::new("aril", Kind::Ours, points(|of| Some(of.us))?),
                Line::new("floor of bytes", Kind::Floor, points(|of| Some(of.floor_us))?),
            ],
        })
    };
    Ok(Plot {
        file: "experts.svg",
        title: format!("LoRA of the experts of a layer of Qwen3-30B-A3B, rank {RANK}, up to {ADAPTERS} adapters"),
        axis: Axis::Time,
        source: source(record, &record.moe),
        panels: vec![
            panel("per_expert", "A and B for each expert")?,
            panel("shared_outer", "A of gate_up and B of down shared by all experts")?,
        ],
    })
}

/// Whether a workload is a layer of the model that is plotted, with no more adapters than plots have.
fn is_plotted(workload: &Workload, rank: usize) -> bool {
    workload.model == MODEL
        && LAYERS.contains(&workload.layer.as_str())
        && workload.max_rank() == rank
        && workload.num_slots() <= ADAPTERS
}

/// Whether its tokens have as many adapters as they may, each about as often.
fn uses_all_adapters(workload: &Workload) -> bool {
    let tokens = workload.num_tokens();
    let distribution = if tokens <= ADAPTERS {
        "distinct"
    } else if workload.suite == Suite::Decode {
        "uniform8"
    } else {
        "seg8"
    };
    workload.distribution() == distribution
}

fn source(record: &Record, results: &Results) -> String {
    format!("{}, commit {}, {}", results.meta.gpu, results.meta.commit(), record.path)
}

/// Geometric means by number of tokens; where some lack a figure there is no point.
fn means(figures: &[&(Subject<'_>, Figures)], of: fn(&Figures) -> Option<f64>) -> Result<Vec<(f64, f64)>> {
    let points = by_tokens(figures.iter().map(|(subject, figures)| (subject.num_tokens(), of(figures))), |us| {
        geometric_mean(us.iter().copied())
    });
    match points.iter().find(|(_, us)| us.is_nan() || *us <= 0.0) {
        Some((tokens, us)) => Err(format!("{us} µs with {tokens} tokens cannot be drawn on a logarithmic axis").into()),
        None => Ok(points),
    }
}

/// Sums of the times that LoRA adds to the layers of a decoder layer, in percent of the sums of their GEMMs' times, by
/// number of tokens; where a layer lacks a figure there is no point.
fn percentages<'a>(figures: impl Iterator<Item = (&'a Workload, Option<f64>, f64)>) -> Result<Vec<(f64, f64)>> {
    let figures = figures
        .map(|(workload, added_us, gemm_us)| (workload.num_tokens(), added_us.map(|added_us| (added_us, gemm_us))));
    let points = by_tokens(figures, |us| {
        let (added_us, gemm_us) = us.iter().fold((0.0, 0.0), |sums, us| (sums.0 + us.0, sums.1 + us.1));
        100.0 * added_us / gemm_us
    });
    match points.iter().find(|(_, percent)| !percent.is_finite()) {
        Some((tokens, percent)) => Err(format!("{percent} % with {tokens} tokens cannot be drawn").into()),
        None => Ok(points),
    }
}

fn by_tokens<T>(figures: impl Iterator<Item = (usize, Option<T>)>, of: impl Fn(&[T]) -> f64) -> Vec<(f64, f64)> {
    let mut by_tokens: BTreeMap<usize, Vec<Option<T>>> = BTreeMap::new();
    for (tokens, figure) in figures {
        by_tokens.entry(tokens).or_default().push(figure);
    }
    let complete = by_tokens.into_iter().filter_map(|(tokens, figures)| {
        let figures: Vec<T> = figures.into_iter().collect::<Option<_>>()?;
        Some((tokens as f64, of(&figures)))
    });
    complete.collect()
}

impl Plot {
    /// Draws it. The same figures give the same bytes.
    pub fn svg(&self) -> Result<String> {
        let mut svg = String::new();
        let panels = u32::try_from(self.panels.len())?;
        {
            let root =
                SVGBackend::with_string(&mut svg, (PANEL.0 * panels, PANEL.1 + TITLE_HEIGHT)).into_drawing_area();
            root.fill(&WHITE)?;
            let (head, body) = root.split_vertically(TITLE_HEIGHT);
            head.draw_text(&self.title, &(FONT, 19).into_font().into(), (12, 10))?;
            head.draw_text(&self.source, &(FONT, 14).into_font().color(&Kind::Floor.color()), (12, 34))?;
            for (panel, area) in self.panels.iter().zip(body.split_evenly((1, self.panels.len()))) {
                panel.draw(self.axis, &area)?;
            }
            root.present()?;
        }
        // The figures, for those who read the file.
        let mut desc = String::from("<desc>\n");
        for Panel { caption, lines } in &self.panels {
            for Line { name, points, .. } in lines {
                let points: Vec<String> = points.iter().map(|(x, figure)| format!("{x}: {figure:.2}")).collect();
                writeln!(
                    desc,
                    "{caption}; {name}; {} by {}: {}",
                    self.axis.unit(),
                    self.axis.x_label(),
                    points.join(", ")
                )?;
            }
        }
        desc.push_str("</desc>\n");
        let head = svg.find('>').ok_or("the SVG has no element")? + 1;
        svg.insert_str(head, &format!("\n{desc}"));
        Ok(svg)
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Panel {
    fn draw(&self, axis: Axis, area: &Area<'_>) -> Result<()> {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let bounds = |of: fn(&(f64, f64)) -> f64| {
            points().map(of).fold((f64::INFINITY, 0.0_f64), |(low, high), value| (low.min(value), high.max(value)))
        };
        let ((left, right), (low, high)) = (bounds(|point| point.0), bounds(|point| point.1));
        let mut chart = ChartBuilder::on(area);
        chart
            .caption(&self.caption, (FONT, 16))
            .margin(10)
            .margin_right(20)
            .x_label_area_size(44)
            .y_label_area_size(60);
        let x = (left..right).log_scale().base(2.0);
        // Room for the legend above the lines.
        match axis {
            Axis::Time => self.draw_lines(axis, chart.build_cartesian_2d(x, (low * 0.8..high * 3.0).log_scale())?),
            Axis::Percent | Axis::Overhead => {
                let mut chart = chart.build_cartesian_2d(x, low.min(0.0) * 1.2..high * 1.9)?;
                chart.draw_series([PathElement::new([(left, 0.0), (right, 0.0)], BLACK.stroke_width(1))])?;
                self.draw_lines(axis, chart)
            }
        }
    }

    fn draw_lines<'a, 'b: 'a, Y>(
        &self,
        axis: Axis,
        mut chart: ChartContext<'a, SVGBackend<'b>, Cartesian2d<LogCoord<f64>, Y>>,
    ) -> Result<()>
    where
        Y: Ranged<ValueType = f64> + ValueFormatter<f64>,
    {
        chart
            .configure_mesh()
            .x_desc(axis.x_label())
            .label_style((FONT, 14))
            .y_desc(axis.label())
            .x_label_formatter(&|x| format!("{x:.0}"))
            .y_label_formatter(&|figure| format!("{figure}"))
            .light_line_style(WHITE.mix(0.0))
            .draw()?;
        for Line { name, kind, points } in &self.lines {
            let (style, kind) = (kind.style(), *kind);
            let points = points.iter().copied();
            if kind == Kind::Floor {
                chart.draw_series(DashedLineSeries::new(points.clone(), 5, 4, style))?
            } else {
                chart.draw_series(LineSeries::new(points.clone(), style))?
            }
            .label(name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 20, y)], style));
            chart.draw_series(points.map(|point| Circle::new(point, 3, kind.color().filled())))?;
        }
        chart
            .configure_series_labels()
            .position(axis.legend())
            .label_font((FONT, 14))
            .background_style(WHITE.mix(0.9))
            .border_style(BLACK.mix(0.2))
            .draw()?;
        Ok(())
    }
}
