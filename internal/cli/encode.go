package cli

import (
	"bytes"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf16"

	"sigs.k8s.io/yaml"
)

// encode prints a value for -o json or -o yaml. Readers get every text unchanged; characters that are not printable are escaped, so that a terminal gets no
// commands.
func encode(to io.Writer, as format, value any) error {
	var text bytes.Buffer
	e := json.NewEncoder(&text)
	e.SetIndent("", "  ")
	err := e.Encode(value)
	if err != nil {
		return err
	}
	out := text.Bytes()
	if as == "yaml" {
		out, err = yamlOf(out)
	} else {
		out = escaped(out, func(r rune) string {
			high, low := utf16.EncodeRune(r)
			return fmt.Sprintf(`\u%04x\u%04x`, high, low)
		})
	}
	if err == nil {
		_, err = to.Write(out)
	}
	return err
}

// escaped returns JSON with escapes for all characters that are not printable, of which JSON itself escapes few. large returns the escape of a character above
// \uffff.
func escaped(text []byte, large func(rune) string) []byte {
	var out bytes.Buffer
	for _, r := range string(text) {
		switch {
		case r == '\n' || unicode.IsPrint(r): // in JSON a line ends between texts only
			out.WriteRune(r)
		case r > 0xffff:
			out.WriteString(large(r))
		default:
			fmt.Fprintf(&out, `\u%04x`, r)
		}
	}
	return out.Bytes()
}

// jsonString matches a string in JSON.
var jsonString = regexp.MustCompile(`"(?:[^"\\]|\\.)*"`)

// yamlOf converts JSON to YAML. The library does not escape all characters that are not printable, so a text with such is replaced by a word until the rest is
// converted. The JSON form of a text is valid in YAML.
func yamlOf(text []byte) ([]byte, error) {
	word := rand.Text()
	var texts []string // words, each followed by its text
	text = jsonString.ReplaceAllFunc(text, func(one []byte) []byte {
		shown := escaped(one, func(r rune) string { return fmt.Sprintf(`\U%08x`, r) })
		if bytes.Equal(shown, one) {
			return one
		}
		own := fmt.Sprintf("%s-%d-", word, len(texts))
		texts = append(texts, own, string(shown))
		return []byte(`"` + own + `"`)
	})
	out, err := yaml.JSONToYAML(text)
	return []byte(strings.NewReplacer(texts...).Replace(string(out))), err
}
