package overview

import "slices"

// Places are what is wrong with nodes and pools, by which of them it is.
type Places map[Subject][]Problem

// Places returns what is wrong with all nodes and pools of a finished overview.
func (o *Overview) Places() Places {
	places := Places{}
	for _, p := range o.Problems {
		if p.Subject.Kind == KindNode || p.Subject.Kind == KindPool {
			places[p.Subject] = append(places[p.Subject], p)
		}
	}
	return places
}

// Around returns what is wrong with a node and one of its pools so that all that is there suffers, the worst first: it cannot be reached
// (Inaccessible or worse), or nobody hears of it (AgentSilent). A pool that is nearly full, say, is well for the volumes that it has.
func (p Places) Around(node, pool string) []Problem {
	var all []Problem
	for _, of := range []Subject{{KindPool, PoolName(node, pool)}, {KindNode, node}} {
		for _, one := range p[of] {
			if Worse(one.Severity, Inaccessible) <= 0 || one.Reason == AgentSilent {
				all = append(all, one)
			}
		}
	}
	sortWorst(all)
	return all
}

// around is Around of a volume: of one with replicas it is none of its problems, as long as there is one which has all that was written and around which all is well.
func (p Places) around(v *Volume) (all []Problem) {
	if v.Replicas == nil {
		return p.Around(v.Node, v.Pool)
	}
	for _, leg := range v.Replicas.Legs {
		if leg.State != LegCurrent {
			continue
		}
		around := p.Around(leg.Node, leg.Pool)
		if len(around) == 0 {
			return nil
		}
		for _, one := range around {
			if !slices.ContainsFunc(all, func(have Problem) bool { return have == one }) {
				all = append(all, one)
			}
		}
	}
	sortWorst(all)
	return all
}

// Of returns what is wrong with a volume, the worst first: with itself, and around it. What is around it is no problem of its own: it is
// one of Overview.Problems already, as its subject says.
func (p Places) Of(v *Volume) []Problem {
	around := p.around(v)
	if len(around) == 0 {
		return v.Problems
	}
	all := slices.Concat(v.Problems, around)
	sortWorst(all)
	return all
}
