package lvmpool

import (
	"encoding/hex"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/ashlar-csi/ashlar/pkg/blockdev"
	"github.com/ashlar-csi/ashlar/pkg/blockdev/internal/catalog"
	"github.com/ashlar-csi/ashlar/pkg/errdefs"
)

// The record of a logical volume is its tags, so it goes wherever the volume group goes:
//
//	ashlar                        it is ours
//	ashlar.state=creating         it is not complete; deleting: it is to be removed
//	ashlar.name=pvc-1             Record.Name
//	ashlar.size=1073741824        Record.Size, in bytes
//	ashlar.created=2026-01-02T15:04:05.123Z
//	ashlar.origin=snap.KEY
//	ashlar.label.fs=ext4          one of Record.Labels
//
// What a tag cannot hold (lvm(8): it takes A-Z a-z 0-9 _ + . - / = ! : & #) is written as
// an exclamation mark and two hexadecimal digits.
const (
	tagOurs     = "ashlar"
	tagState    = "ashlar.state="
	tagName     = "ashlar.name="
	tagSize     = "ashlar.size="
	tagCreated  = "ashlar.created="
	tagOrigin   = "ashlar.origin="
	tagLabel    = "ashlar.label."
	tagCreating = tagState + string(catalog.Creating)

	// maxTag is the longest tag that lvm2 takes, in bytes (NAME_LEN of older versions is
	// only for the names of objects).
	maxTag = 1023

	// maxTags is how many a record may have: all of them fit into one command that makes a
	// volume, and as many into one that changes half of them (lvm2.MaxWords).
	maxTags = 45
)

func escapeTag(text string) string {
	var b strings.Builder
	for i := range len(text) {
		switch c := text[i]; {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9', strings.IndexByte("_+.-/:", c) >= 0:
			b.WriteByte(c)
		default:
			fmt.Fprintf(&b, "!%02x", c)
		}
	}
	return b.String()
}

func unescapeTag(text string) (string, error) {
	var b strings.Builder
	for {
		plain, rest, found := strings.Cut(text, "!")
		b.WriteString(plain)
		if !found {
			return b.String(), nil
		}
		if len(rest) < 2 {
			return "", fmt.Errorf("%w: tag %q", catalog.ErrRecord, text)
		}
		c, err := hex.DecodeString(rest[:2])
		if err != nil {
			return "", fmt.Errorf("%w: tag %q", catalog.ErrRecord, text)
		}
		b.Write(c)
		text = rest[2:]
	}
}

// tagsOf returns the tags of a record, sorted.
func tagsOf(r blockdev.Record, st catalog.State) ([]string, error) {
	tags := []string{tagOurs, tagName + escapeTag(r.Name), tagSize + strconv.FormatInt(r.Size, 10),
		tagCreated + r.Created.UTC().Format(time.RFC3339Nano)}
	if st != catalog.Ready {
		tags = append(tags, tagState+string(st))
	}
	if r.Origin != (blockdev.Ref{}) {
		tags = append(tags, tagOrigin+r.Origin.String())
	}
	for key, value := range r.Labels {
		tags = append(tags, tagLabel+escapeTag(key)+"="+escapeTag(value))
	}
	for _, tag := range tags {
		if len(tag) > maxTag {
			return nil, fmt.Errorf("%w: the record of %s has a tag of %d bytes, %d is the most: %.80s", errdefs.ErrInvalid, r.Ref, len(tag), maxTag, tag)
		}
	}
	if len(tags) > maxTags {
		return nil, fmt.Errorf("%w: the record of %s has %d tags, %d are the most", errdefs.ErrInvalid, r.Ref, len(tags), maxTags)
	}
	slices.Sort(tags)
	return tags, nil
}

// parseTags is the strict inverse of tagsOf. It ignores tags that are not ours. catalog.ErrRecord if they are not understood.
func parseTags(ref blockdev.Ref, tags []string) (blockdev.Record, catalog.State, error) {
	r, st := blockdev.Record{Ref: ref, Labels: map[string]string{}}, catalog.Ready
	seen := map[string]bool{}
	for _, tag := range tags {
		key, value, _ := strings.Cut(tag, "=")
		if !strings.HasPrefix(key, tagOurs+".") {
			continue
		}
		if seen[key] {
			return r, st, fmt.Errorf("%w: %s has the tag %s twice", catalog.ErrRecord, ref, key)
		}
		seen[key] = true
		if err := readTag(&r, &st, key, value); err != nil {
			return r, st, fmt.Errorf("%w: %s: tag %s: %w", catalog.ErrRecord, ref, tag, err)
		}
	}
	if !slices.Contains(tags, tagOurs) {
		return r, st, fmt.Errorf("%w: %s has no tag %s", catalog.ErrRecord, ref, tagOurs)
	}
	for _, tag := range []string{tagName, tagSize, tagCreated} {
		if !seen[strings.TrimSuffix(tag, "=")] {
			return r, st, fmt.Errorf("%w: %s has no tag %s", catalog.ErrRecord, ref, tag)
		}
	}
	if r.Size <= 0 || r.Size > blockdev.MaxSize {
		return r, st, fmt.Errorf("%w: %s: size %d", catalog.ErrRecord, ref, r.Size)
	}
	r.Ready = st == catalog.Ready
	return r, st, nil
}

// readTag puts one tag into a record.
func readTag(r *blockdev.Record, st *catalog.State, key, value string) error {
	text, err := unescapeTag(value)
	if err != nil {
		return err
	}
	switch key + "=" {
	case tagState:
		if *st = catalog.State(text); *st != catalog.Creating && *st != catalog.Deleting {
			err = fmt.Errorf("%w: state %q", catalog.ErrRecord, text)
		}
	case tagName:
		r.Name = text
	case tagSize:
		r.Size, err = strconv.ParseInt(text, 10, 64)
	case tagCreated:
		r.Created, err = time.Parse(time.RFC3339Nano, text)
	case tagOrigin:
		r.Origin = blockdev.ParseRef(text)
		err = r.Origin.Validate()
	default:
		escaped, ok := strings.CutPrefix(key, tagLabel)
		if !ok {
			return fmt.Errorf("%w: unknown tag %s", catalog.ErrRecord, key)
		}
		var label string
		if label, err = unescapeTag(escaped); err == nil {
			r.Labels[label] = text
		}
	}
	return err
}

// changeTags returns the arguments of lvchange that turn the tags of one record into
// those of another.
func changeTags(from, to []string) (args []string) {
	for _, tag := range from {
		if !slices.Contains(to, tag) {
			args = append(args, "--deltag="+tag)
		}
	}
	for _, tag := range to {
		if !slices.Contains(from, tag) {
			args = append(args, "--addtag="+tag)
		}
	}
	return args
}

func addTags(tags []string) (args []string) { return changeTags(nil, tags) }
