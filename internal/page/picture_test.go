package page

import (
	"bytes"
	"cmp"
	"flag"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/chromedp/chromedp"

	"github.com/ashlar-csi/ashlar/internal/check"
)

var pictures = flag.String("page.pictures", "", "directory to write the pictures of the README to (make picture)")

// TestPictures makes the pictures of the README, from a made-up cluster.
func TestPictures(t *testing.T) {
	s := serve(t, small(), nil)
	b := newTab(t, s)
	b.do(chromedp.EmulateViewport(1180, 1320, chromedp.EmulateScale(1.5)))
	for scheme, name := range map[string]string{"light": "page.png", "dark": "page-dark.png"} {
		b.scheme(scheme)
		b.open("/")
		b.waitText("#following", "Follows changes")
		text, err := chromedp.Run(b.ctx, chromedp.CaptureScreenshot())
		check.OK(t, err)
		small := fewColours(t, text)
		if len(small) > 250_000 || len(small) < 20_000 {
			t.Errorf("%s has %d bytes", name, len(small))
		}
		if *pictures != "" {
			check.OK(t, os.WriteFile(filepath.Join(*pictures, name), small, 0o644))
		}
	}
}

// fewColours returns a picture with at most 256 colours: the most frequent ones; others become the nearest of these.
func fewColours(t *testing.T, text []byte) []byte {
	t.Helper()
	from, err := png.Decode(bytes.NewReader(text))
	check.OK(t, err)
	count := map[color.RGBA]int{}
	bounds := from.Bounds()
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			count[color.RGBAModel.Convert(from.At(x, y)).(color.RGBA)]++
		}
	}
	most := slices.SortedFunc(maps.Keys(count), func(a, b color.RGBA) int { return cmp.Compare(count[b], count[a]) })
	var palette color.Palette
	for _, c := range most[:min(256, len(most))] {
		palette = append(palette, c)
	}
	nearest := map[color.RGBA]uint8{}
	for c := range count {
		nearest[c] = uint8(palette.Index(c))
	}
	to := image.NewPaletted(bounds, palette)
	for y := bounds.Min.Y; y < bounds.Max.Y; y++ {
		for x := bounds.Min.X; x < bounds.Max.X; x++ {
			to.SetColorIndex(x, y, nearest[color.RGBAModel.Convert(from.At(x, y)).(color.RGBA)])
		}
	}
	var out bytes.Buffer
	check.OK(t, (&png.Encoder{CompressionLevel: png.BestCompression}).Encode(&out, to))
	return out.Bytes()
}
