//! Where windows lie in planes.

use crate::scratch::Scratch;

/// The part of a plane, with zeros around it, that windows lie in.
#[derive(Clone, Copy)]
pub(super) struct Window {
    /// Its first row and column in the plane.
    pub(super) origin: [isize; 2],
    pub(super) size: [usize; 2],
}

impl Window {
    /// From the first to the last place along each dimension. Without any it is one value.
    pub(super) fn around(ends: [Option<(isize, isize)>; 2]) -> Self {
        let ends = ends.map(|ends| ends.unwrap_or((0, 0)));
        Self {
            origin: ends.map(|(low, _)| low),
            size: ends.map(|(low, high)| (high - low + 1) as usize),
        }
    }

    /// A place of the plane, from the first row and column of this part.
    pub(super) fn inside(&self, place: [isize; 2]) -> [usize; 2] {
        [0, 1].map(|dim| (place[dim] - self.origin[dim]) as usize)
    }

    pub(super) fn offset(&self, channel: usize, [row, column]: [usize; 2]) -> u32 {
        let offset = (channel * self.size[0] + row) * self.size[1] + column;
        offset
            .try_into()
            .expect("an image of less than 16 GiB with its padding")
    }

    pub(super) fn values(&self, channels: usize) -> usize {
        channels * self.size[0] * self.size[1]
    }

    /// Whether it is the plane itself.
    pub(super) fn is_whole(&self, plane: [usize; 2]) -> bool {
        self.origin == [0, 0] && self.size == plane
    }

    /// Copies this part of each plane. What is around the planes stays: [`zeros`](Self::zeros), whichever planes were there before.
    pub(super) fn fill(&self, planes: &[f32], [height, width]: [usize; 2], out: &mut [f32]) {
        let [rows, columns] = self.size;
        // The first and the end of the plane's rows, or columns, in this part.
        let [(top, bottom), (left, right)] = [(0, height), (1, width)].map(|(dim, side)| {
            let within = |place: isize| place.clamp(0, self.size[dim] as isize) as usize;
            let first = within(-self.origin[dim]);
            (first, within(side as isize - self.origin[dim]).max(first))
        });
        if top == bottom || left == right {
            return;
        }
        let from = self.plane_offset([top, left], width);
        let planes = planes.chunks_exact(height * width);
        for (plane, out) in planes.zip(out.chunks_exact_mut(rows * columns)) {
            let rows = plane[from..].chunks(width);
            let out = out[top * columns..bottom * columns].chunks_exact_mut(columns);
            for (row, out) in rows.zip(out) {
                copy(&row[..right - left], &mut out[left..right]);
            }
        }
    }

    /// Where in the plane a place of this part is.
    fn plane_offset(&self, [row, column]: [usize; 2], width: usize) -> usize {
        let [row, column] = [(0, row), (1, column)]
            .map(|(dim, place)| (place as isize + self.origin[dim]) as usize);
        row * width + column
    }

    /// Room for this part of so many planes, with zeros around them. Nothing if it is the plane itself.
    pub(super) fn zeros(&self, planes: usize, plane: [usize; 2]) -> Scratch {
        let mut zeros = Scratch::new(match self.is_whole(plane) {
            true => 0,
            false => self.values(planes),
        });
        zeros.fill(0.0);
        zeros
    }
}

/// Copies a row. Most are so short that a call of the system's function would take longer than the copy.
fn copy(from: &[f32], to: &mut [f32]) {
    const AT_ONCE: usize = 8;
    let Some(last) = from.len().checked_sub(AT_ONCE) else {
        for (to, from) in to.iter_mut().zip(from) {
            *to = *from;
        }
        return;
    };
    // The last values overlap the ones before, without which the compiler would make that call of the loop.
    for at in (0..from.len()).step_by(AT_ONCE) {
        let at = at.min(last);
        let values: [f32; AT_ONCE] = from[at..][..AT_ONCE].try_into().expect("as many");
        to[at..][..AT_ONCE].copy_from_slice(&values);
    }
}
