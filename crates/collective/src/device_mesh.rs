//! The ranks of a group as a grid with named dimensions, and a sub-group along each.

use std::fmt;

use crate::error::Error;
use crate::group::ProcessGroup;

/// Ranks arranged in a grid: pipeline stages by replicas, nodes by devices. Cheap to clone.
///
/// The last dimension varies fastest: in a mesh of `pp` 2 by `dp` 4, ranks 0 to 3 are the first pipeline stage.
///
/// *Source*: torch's `init_device_mesh`.
///
/// # Example
///
/// ```
/// use paceline_collective::{DeviceMesh, GroupOptions, ProcessGroup, ReduceOp};
///
/// let groups = ProcessGroup::local(4, &GroupOptions::default())?;
/// std::thread::scope(|scope| {
///     for group in groups {
///         scope.spawn(move || {
///             let mesh = DeviceMesh::new(&group, &[("pp", 2), ("dp", 2)]).unwrap();
///             assert_eq!(mesh.coordinate("pp").unwrap(), group.rank() / 2);
///             let mut gradient = [group.rank() as f32];
///             mesh.group("dp").unwrap().all_reduce(&mut gradient, ReduceOp::Sum).unwrap();
///             assert_eq!(gradient, [if group.rank() < 2 { 1.0 } else { 5.0 }]);
///         });
///     }
/// });
/// # Ok::<(), paceline_collective::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct DeviceMesh {
    parent: ProcessGroup,
    shape: Shape,
    /// One for each dimension.
    groups: Vec<ProcessGroup>,
}

impl DeviceMesh {
    /// Arranges the ranks of `group`, and makes one sub-group for each dimension: the ranks that differ in nothing else.
    ///
    /// All ranks must call it, with the same dimensions. Sub-groups are called by their dimension and their number among
    /// those of it, "dp1".
    ///
    /// *Blocks*: and *Cost*: one [`split`](ProcessGroup::split) for each dimension.
    ///
    /// *Errors*: sizes whose product is not the number of ranks, and names that are empty or repeat; such a call
    /// reaches nobody and breaks nothing.
    pub fn new(group: &ProcessGroup, dims: &[(&str, usize)]) -> Result<Self, Error> {
        let shape = Shape::new(dims);
        shape
            .check(group.world())
            .map_err(|reason| shape.error(group, reason))?;
        let groups = (0..dims.len())
            .map(|dim| shape.split(group, &[dim], &shape.names[dim]))
            .collect::<Result<_, _>>()?;
        Ok(Self {
            parent: group.clone(),
            shape,
            groups,
        })
    }

    /// The names of the dimensions, the slowest first.
    pub fn dims(&self) -> &[String] {
        &self.shape.names
    }

    /// How many ranks a dimension has. *Errors*: no dimension of that name.
    pub fn size(&self, dim: &str) -> Result<usize, Error> {
        Ok(self.shape.sizes[self.find(dim)?])
    }

    /// Where this rank stands in a dimension: its rank in [`group`](Self::group). *Errors*: no dimension of that name.
    pub fn coordinate(&self, dim: &str) -> Result<usize, Error> {
        let dim = self.find(dim)?;
        Ok(self.shape.coordinates(self.parent.rank())[dim])
    }

    /// The ranks that differ from this one in this dimension alone. *Errors*: no dimension of that name.
    pub fn group(&self, dim: &str) -> Result<&ProcessGroup, Error> {
        Ok(&self.groups[self.find(dim)?])
    }

    /// As [`group`](Self::group), for a mesh that may lack the dimension.
    pub fn get(&self, dim: &str) -> Option<&ProcessGroup> {
        self.find(dim).ok().map(|dim| &self.groups[dim])
    }

    /// All ranks of the mesh.
    pub fn parent(&self) -> &ProcessGroup {
        &self.parent
    }

    /// One group over several dimensions: the ranks that differ from this one in these alone. The last dimension named
    /// varies fastest.
    ///
    /// All ranks must call it. *Errors*: no dimension of that name, or one that is named twice; that breaks nothing.
    pub fn flatten(&self, dims: &[&str]) -> Result<ProcessGroup, Error> {
        let found = dims
            .iter()
            .map(|dim| self.find(dim))
            .collect::<Result<Vec<_>, _>>()?;
        if let Some(twice) = (1..found.len()).find(|at| found[..*at].contains(&found[*at])) {
            let reason = format!("dimension {:?} is named twice", dims[twice]);
            return Err(self.shape.error(&self.parent, reason));
        }
        self.shape.split(&self.parent, &found, &dims.join("_"))
    }

    fn find(&self, dim: &str) -> Result<usize, Error> {
        let found = self.shape.names.iter().position(|name| name == dim);
        found.ok_or_else(|| {
            let reason = format!("there is no dimension {dim:?}");
            self.shape.error(&self.parent, reason)
        })
    }
}

/// Names and sizes, the slowest dimension first.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Shape {
    names: Vec<String>,
    sizes: Vec<usize>,
}

/// "pp 2, dp 4".
impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.names.is_empty() {
            return f.write_str("no dimensions");
        }
        for (i, (name, size)) in self.names.iter().zip(&self.sizes).enumerate() {
            write!(f, "{}{name} {size}", if i == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl Shape {
    fn new(dims: &[(&str, usize)]) -> Self {
        Self {
            names: dims.iter().map(|(name, _)| (*name).to_owned()).collect(),
            sizes: dims.iter().map(|(_, size)| *size).collect(),
        }
    }

    fn check(&self, world: usize) -> Result<(), String> {
        let product = self
            .sizes
            .iter()
            .try_fold(1_usize, |product, size| product.checked_mul(*size));
        if product != Some(world) {
            let product = product.map_or("too many".into(), |product| product.to_string());
            return Err(format!("it has {product} places for {world} ranks"));
        }
        for (at, name) in self.names.iter().enumerate() {
            if name.is_empty() {
                return Err("a dimension has no name".into());
            }
            if self.names[..at].contains(name) {
                return Err(format!("two dimensions are called {name:?}"));
            }
        }
        Ok(())
    }

    fn coordinates(&self, rank: usize) -> Vec<usize> {
        let mut rest = rank;
        let mut coordinates: Vec<usize> = self
            .sizes
            .iter()
            .rev()
            .map(|size| {
                let coordinate = rest % size;
                rest /= size;
                coordinate
            })
            .collect();
        coordinates.reverse();
        coordinates
    }

    /// The place of these coordinates among those of the dimensions, the last one varying fastest.
    fn flat(&self, coordinates: &[usize], dims: &[usize]) -> usize {
        dims.iter()
            .fold(0, |flat, dim| flat * self.sizes[*dim] + coordinates[*dim])
    }

    /// Colour and key of a rank for the groups along `dims`.
    fn place(&self, rank: usize, dims: &[usize]) -> (usize, usize) {
        let coordinates = self.coordinates(rank);
        let others: Vec<usize> = (0..self.sizes.len())
            .filter(|dim| !dims.contains(dim))
            .collect();
        (
            self.flat(&coordinates, &others),
            self.flat(&coordinates, dims),
        )
    }

    fn split(
        &self,
        group: &ProcessGroup,
        dims: &[usize],
        name: &str,
    ) -> Result<ProcessGroup, Error> {
        // Both are below the number of ranks.
        let (colour, key) = self.place(group.rank(), dims);
        let made = group.split_as(Some(colour as u32), key as i64, |colour| {
            format!("{name}{colour}")
        })?;
        made.ok_or_else(|| self.error(group, "this rank is in no group".into()))
    }

    fn error(&self, group: &ProcessGroup, reason: String) -> Error {
        Error::Mesh {
            dims: self.to_string(),
            group: group.name().to_owned(),
            reason,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_dimension_varies_fastest() {
        let shape = Shape::new(&[("pp", 2), ("dp", 3), ("tp", 2)]);
        assert_eq!(shape.coordinates(0), [0, 0, 0]);
        assert_eq!(shape.coordinates(1), [0, 0, 1]);
        assert_eq!(shape.coordinates(7), [1, 0, 1]);
        assert_eq!(shape.coordinates(11), [1, 2, 1]);
        for rank in 0..12 {
            assert_eq!(shape.flat(&shape.coordinates(rank), &[0, 1, 2]), rank);
        }
    }

    #[test]
    fn a_group_holds_the_ranks_that_differ_in_its_dimensions_alone() {
        let shape = Shape::new(&[("pp", 2), ("dp", 3), ("tp", 2)]);
        let along = |dims: &[usize]| {
            let colour = shape.place(7, dims).0;
            let mut ranks: Vec<(usize, usize)> = (0..12)
                .filter(|rank| shape.place(*rank, dims).0 == colour)
                .map(|rank| (shape.place(rank, dims).1, rank))
                .collect();
            ranks.sort_unstable();
            ranks.into_iter().map(|(_, rank)| rank).collect::<Vec<_>>()
        };
        assert_eq!(along(&[0]), [1, 7]);
        assert_eq!(along(&[1]), [7, 9, 11]);
        assert_eq!(along(&[2]), [6, 7]);
        assert_eq!(along(&[0, 2]), [0, 1, 6, 7]);
        assert_eq!(along(&[2, 0]), [0, 6, 1, 7]);
        assert_eq!(along(&[]), [7]);
    }

    #[test]
    fn a_shape_that_does_not_fit_says_why() {
        for (dims, words) in [
            (&[("pp", 2), ("dp", 4)][..], "8 places for 6 ranks"),
            (&[("pp", 2), ("pp", 3)], "two dimensions are called \"pp\""),
            (&[("", 6)], "has no name"),
            (&[("pp", 0)], "0 places"),
            (&[("pp", usize::MAX), ("dp", 2)], "too many places"),
            (&[], "1 places for 6 ranks"),
        ] {
            let reason = Shape::new(dims).check(6).unwrap_err();
            assert!(reason.contains(words), "{reason}");
        }
        assert!(Shape::new(&[("pp", 2), ("dp", 3)]).check(6).is_ok());
    }
}
